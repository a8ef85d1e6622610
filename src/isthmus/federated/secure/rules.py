"""Constraints on a job with `[aggregation] secure = true`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.robust import Aggregation
from isthmus.protocol.federated_participation import Participation
from isthmus.protocol.federated_rules import SecureRules
from isthmus.protocol.secure_graph import LEAST_SUMMED


def check_secure(
    aggregation: Aggregation, participation: Participation, admission: AdmissionRules, algorithm: Algorithm
) -> None:
    """UserError for what does not go together with sums of updates that nobody sees."""
    if not aggregation.secure:
        return
    for field, got, why in _refusals(aggregation, participation, admission, algorithm):
        raise UserError(f"{field}: got {got} beside aggregation.secure, {why}")
    if aggregation.most_samples is None:
        what = "missing, expected the most samples of a site: with aggregation.secure no site says how many it has"
        raise UserError(f"aggregation.most_samples: {what}")
    if participation.minimum < LEAST_SUMMED:
        what = f"got {participation.minimum} beside aggregation.secure, expected at least {LEAST_SUMMED}"
        raise UserError(f"participation.minimum: {what}: the sum of one update is that update")
    if not 0 < aggregation.wait_s < math.inf:
        raise UserError(f"aggregation.wait: got {aggregation.wait!r}, expected more than 0 s")


def check_sizes(aggregation: Aggregation, sizes: NDArray[np.int64]) -> None:
    """UserError for a simulated client with more samples than the job says."""
    most = aggregation.most_samples
    if most is not None and (largest := int(sizes.max())) > most:
        raise UserError(f"aggregation.most_samples: got {most}, expected at least {largest}, the samples of a client")


def _refusals(
    aggregation: Aggregation, participation: Participation, admission: AdmissionRules, algorithm: Algorithm
) -> Iterator[tuple[str, str, str]]:
    if aggregation.rule != "declared":
        yield "aggregation.rule", repr(aggregation.rule), "which needs every update by itself: expected 'declared'"
    collected = sorted(n for p in algorithm.passes for n, combine in p.returns.items() if combine == "collect")
    if collected:
        yield "federated.algorithm", f"one that collects {collected[0]!r} of every client", "expected means and sums"
    if participation.staleness:
        why = "which masks an update with those of its own round: expected 0"
        yield "participation.staleness", str(participation.staleness), why
    if participation.weighted:
        yield "participation.weighted", "true", "where nobody knows how many samples a site has: expected false"
    if participation.min_samples > 1:
        why = "where nobody knows how many samples a site has: expected 1"
        yield "participation.min_samples", str(participation.min_samples), why
    if admission.max_norm is not None and not admission.clip:
        why = "where no norm can be checked without a proof: expected admission.clip = true, and sites clip"
        yield "admission.max_norm", f"{admission.max_norm:g}", why


def secure_rules(aggregation: Aggregation, minimum: int) -> SecureRules | None:
    """For the machines; None where sums are not masked. `minimum` updates make a sum."""
    if not aggregation.secure:
        return None
    return SecureRules(share=aggregation.threshold, wait_s=aggregation.wait_s, fewest=max(LEAST_SUMMED, minimum))
