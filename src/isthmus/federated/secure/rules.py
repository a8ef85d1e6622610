"""Constraints on a job with `[federated.aggregation] secure = true`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.robust import Aggregation
from isthmus.protocol.federated_participation import Participation
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_site import LEAST_SUMMED


def check_secure(
    aggregation: Aggregation, participation: Participation, admission: AdmissionRules, algorithm: Algorithm
) -> None:
    """UserError for what does not go together with sums of updates that nobody sees."""
    if not aggregation.secure:
        return
    for what, got in _refusals(aggregation, participation, admission, algorithm):
        raise refused(what, "secure sums", got)
    if aggregation.most_samples is None:
        raise UserError(
            "federated.aggregation.most_samples: missing, expected the most samples of a site: with "
            "federated.aggregation.secure no site says how many it has"
        )
    if participation.minimum < LEAST_SUMMED:
        what = f"got {participation.minimum} beside federated.aggregation.secure, expected at least {LEAST_SUMMED}"
        raise UserError(f"federated.participation.minimum: {what}: the sum of one update is that update")
    if not 0 < aggregation.wait_s < math.inf:
        raise UserError(f"federated.aggregation.wait: got {aggregation.wait!r}, expected more than 0 s")


def check_sizes(aggregation: Aggregation, sizes: NDArray[np.int64]) -> None:
    """UserError for a simulated client with more samples than the job says."""
    most = aggregation.most_samples
    if most is not None and (largest := int(sizes.max())) > most:
        raise UserError(
            f"federated.aggregation.most_samples: got {most}, expected at least {largest}, the samples of a client"
        )


def _refusals(
    aggregation: Aggregation, participation: Participation, admission: AdmissionRules, algorithm: Algorithm
) -> Iterator[tuple[str, object]]:
    """Yield what is asked for, and how."""
    if aggregation.rule != "declared":
        yield "robust aggregation", repr(aggregation.rule)
    collected = sorted(n for p in algorithm.passes for n, combine in p.returns.items() if combine == "collect")
    if collected:
        yield "collected values", f"one that collects {collected[0]!r} of every client"
    if participation.staleness:
        yield "late updates", participation.staleness
    if participation.weighted:
        yield "weighted clients", True
    if participation.min_samples > 1:
        yield "a least number of samples", participation.min_samples
    if admission.max_norm is not None and not admission.clip:
        yield "a largest norm", f"{admission.max_norm:g}"


def secure_rules(aggregation: Aggregation, minimum: int) -> SecureRules | None:
    """For the machines; None where sums are not masked. `minimum` updates make a sum."""
    if not aggregation.secure:
        return None
    return SecureRules(share=aggregation.threshold, wait_s=aggregation.wait_s, fewest=max(LEAST_SUMMED, minimum))
