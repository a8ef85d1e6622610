"""One federated round to schedule: clients of known sizes, and executors whose time for a client is a line.

`T_mk = N_m t_k + b_k` (Parrot, Eq. 2). Executors train their clients one after another, so the round lasts as long as
the busiest of them (Parrot, Eq. 3). `b_k` is paid per client: an executor that gets no client costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class CohortProblem:
    """Clients and executors by number. The arrays are kept as read-only copies.

    Raises UserError for arrays that are empty, not one-dimensional or not finite, for a size that is not above 0, for
    a time below 0, and for an executor that takes no time at all.
    """

    sizes: Floats  # (clients,) N_m, in samples
    seconds_per_sample: Floats  # (executors,) t_k
    fixed_s: Floats  # (executors,) b_k: what a client costs whatever its size

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name)))
        if not (self.sizes > 0).all():
            raise UserError(f"sizes: got {self.sizes.min()}, expected numbers above 0")
        if self.seconds_per_sample.shape != self.fixed_s.shape:
            executors = len(self.seconds_per_sample)
            raise UserError(f"fixed_s: got {len(self.fixed_s)} numbers, expected {executors}, one per executor")
        for name, times in (("seconds_per_sample", self.seconds_per_sample), ("fixed_s", self.fixed_s)):
            if (times < 0).any():
                raise UserError(f"{name}: got {times.min()}, expected no number below 0")
        idle = np.flatnonzero(self.seconds_per_sample + self.fixed_s == 0)
        if len(idle):
            raise UserError(f"seconds_per_sample: got 0 for executor {idle[0]}, expected above 0 where fixed_s is 0")

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def executors(self) -> int:
        return len(self.fixed_s)

    def client_s(self) -> Floats:
        """(clients, executors) seconds of every client on every executor."""
        return np.outer(self.sizes, self.seconds_per_sample) + self.fixed_s

    def load_s(self, executor_of: Integers) -> Floats:
        """(executors,) seconds that each is busy when client m is trained by `executor_of[m]`."""
        seconds = self.sizes * self.seconds_per_sample[executor_of] + self.fixed_s[executor_of]
        return np.asarray(np.bincount(executor_of, seconds, self.executors), dtype=np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class CohortSchedule:
    """The clients of each executor, the round's time, and the largest possible gain over it."""

    algorithm: str
    executor_of: Integers  # (clients,) the executor of each client
    load_s: Floats  # (executors,) seconds that each executor is busy; 0 without a client
    lower_bound_s: float | None = None
    """No schedule of these clients ends sooner; None where the algorithm proves nothing."""

    @property
    def makespan_s(self) -> float:
        """Seconds of the round: those of the busiest executor."""
        return float(self.load_s.max())

    @property
    def gap(self) -> float | None:
        """(makespan - lower bound) / lower bound; 0 is optimal."""
        return None if self.lower_bound_s is None else self.makespan_s / self.lower_bound_s - 1

    def clients_of(self) -> Iterator[Integers]:
        """For each executor its clients, ascending."""
        for executor in range(len(self.load_s)):
            yield np.flatnonzero(self.executor_of == executor)


def scheduled(problem: CohortProblem, executor_of: Integers, *, algorithm: str) -> CohortSchedule:
    return CohortSchedule(algorithm=algorithm, executor_of=executor_of, load_s=problem.load_s(executor_of))


def _checked(name: str, values: Floats) -> Floats:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: got {type(values).__name__}, expected an array of numbers") from error
    if array.ndim != 1 or array.size == 0:
        raise UserError(f"{name}: got an array of shape {array.shape}, expected one dimension and at least one number")
    if not np.isfinite(array).all():
        raise UserError(f"{name}: got {array[~np.isfinite(array)][0]}, expected finite numbers")
    array.flags.writeable = False
    return array
