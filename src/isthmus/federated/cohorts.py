"""The clients of each round of a simulation: drawn for each round, or, where updates may be late, the clients that
finish."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob, availability, chooser, members
from isthmus.protocol.federated_participation import Buffer, Integers, Participation


def check_enough(rules: Participation, sizes: Integers) -> None:
    """UserError where fewer clients than a round's least number have enough samples."""
    if (found := len(rules.candidates(sizes, None))) < rules.minimum:
        raise UserError(
            f"federated.participation.min_samples: got {rules.min_samples}, and {found} of {len(sizes)} clients "
            f"have as many, expected at least {rules.minimum} (federated.participation.minimum)"
        )


class Cohorts:
    """The same for the same job and sizes, on every machine."""

    def __init__(self, job: FederatedJob, sizes: Integers) -> None:
        """`sizes` (population,) in samples. UserError for a file of availability that cannot be used, and where too few
        clients have enough samples."""
        self._job, self._sizes = job, sizes
        check_enough(job.federated.participation, sizes)
        self._available = availability(job, len(sizes))
        rules = job.federated.participation
        self._buffer = Buffer(rules, sizes, job.training.seed, self._here, chooser(rules)) if rules.staleness else None

    def _here(self, round_: int) -> Integers | None:
        return None if self._available is None else self._available.at_round(round_)

    def members(self, round_: int) -> Integers:
        """(clients,) numbers, ascending."""
        if self._buffer is not None:
            return np.array(list(self._buffer.round(round_)), dtype=np.int64)
        return members(self._job, self._sizes, round_, self._here(round_))

    def late(self, round_: int) -> Mapping[int, int]:
        """Return by how many rounds each client is late; empty where none ever is."""
        return {} if self._buffer is None else self._buffer.round(round_)

    @property
    def buffer(self) -> tuple[int, int] | None:
        """Updates that make a round, and clients at work at any time; None where rounds do not overlap."""
        return None if self._buffer is None else (self._buffer.size, self._buffer.at_work)
