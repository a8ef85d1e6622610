"""FedML Parrot: how long an executor takes for a client, and its task scheduling (Algorithm 3).

Times are a line per executor, `T = N t_k + b_k`, fitted to what it took before (Eq. 2 and `Estimate_Workload`): one
linear regression over all rounds or over those of a time window, which follows executors whose speed changes. The
schedule is equal numbers of clients in the first R_w rounds, before any time was recorded; then the largest client
first, greedily. Ours counts what it takes to move a state from node to node, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule, Floats, Integers, scheduled


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeHistory:
    """One entry per client that was trained, in any order.

    Raises UserError for arrays of different lengths, for negative numbers, and for times or sizes that are not finite.
    """

    rounds: Integers  # (records,) the round, from 0 on
    executors: Integers  # (records,) who trained
    sizes: Floats  # (records,) N_m, in samples
    seconds: Floats  # (records,) what it took

    def __post_init__(self) -> None:
        for name in ("rounds", "executors", "sizes", "seconds"):
            values: Integers | Floats = getattr(self, name)
            if values.shape != (len(self.rounds),):
                raise UserError(f"{name}: got shape {values.shape}, expected {(len(self.rounds),)} as of rounds")
            wrong = values[~((values >= 0) & (values < np.inf))]
            if len(wrong):
                raise UserError(f"{name}: got {wrong[0]}, expected finite numbers from 0 on")


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeModel:
    """The line of every executor."""

    seconds_per_sample: Floats  # (executors,) t_k, at least 0
    fixed_s: Floats  # (executors,) b_k, at least 0

    def problem(self, sizes: Floats) -> CohortProblem:
        """The round that trains clients of `sizes` samples. Raises UserError as `CohortProblem` does."""
        return CohortProblem(sizes=sizes, seconds_per_sample=self.seconds_per_sample, fixed_s=self.fixed_s)


def equal_times(executors: int) -> TimeModel:
    """One second per sample for all: what to assume in the first R_w rounds, which `uniform` schedules."""
    if executors < 1:
        raise UserError(f"executors: got {executors}, expected at least 1")
    return TimeModel(seconds_per_sample=np.ones(executors), fixed_s=np.zeros(executors))


def fit_times(history: TimeHistory, executors: int, *, window_rounds: int | None = None) -> TimeModel:
    """Least squares per executor over all rounds, or over the last `window_rounds` (tau) of the history.

    Unlike the paper's regression, no line falls with the size or starts below 0: then the best line that does not is
    taken, which is one through the origin or a constant. One size alone gives a line through the origin.
    An executor that the window knows nothing of (it may have got no client) is fitted to all that is known of it.
    Raises UserError for a window below 1, a record of an unknown executor, and an executor without any record.
    """
    if window_rounds is not None and window_rounds < 1:
        raise UserError(f"window_rounds: got {window_rounds}, expected at least 1")
    unknown = history.executors[history.executors >= executors]
    if len(unknown):
        raise UserError(f"executors: got a record of executor {unknown[0]}, expected numbers below {executors}")
    missing = np.flatnonzero(np.bincount(history.executors, minlength=executors) == 0)
    if len(missing):
        raise UserError(f"executors: got no record of executor {missing[0]}, expected one of each: schedule uniformly")
    used = _inside(history, executors, window_rounds)
    return _lines(history.executors[used], history.sizes[used], history.seconds[used], executors)


def _inside(history: TimeHistory, executors: int, window_rounds: int | None) -> NDArray[np.bool_]:
    """(records,) those of the window, and all records of executors that have none there."""
    if window_rounds is None:
        return np.ones(len(history.rounds), dtype=bool)
    recent = history.rounds > history.rounds.max() - window_rounds
    seen = np.bincount(history.executors[recent], minlength=executors) > 0
    return recent | ~seen[history.executors]


def _lines(executor: Integers, x: Floats, y: Floats, executors: int) -> TimeModel:
    """Every executor's line at once: their sums are taken by executor number."""

    def summed(values: Floats) -> Floats:
        return np.asarray(np.bincount(executor, values, executors), dtype=np.float64)

    count = np.bincount(executor, minlength=executors)
    mean_x, mean_y = summed(x) / count, summed(y) / count
    # Centred first: the textbook form n Sxy - Sx Sy cancels where sizes are large and alike.
    dx, dy = x - mean_x[executor], y - mean_y[executor]
    spread = summed(dx * dx)
    slope = np.divide(summed(dx * dy), spread, out=np.zeros(executors), where=spread > 0)
    fixed = mean_y - slope * mean_x
    squares = summed(x * x)
    origin = np.divide(summed(x * y), squares, out=np.zeros(executors), where=squares > 0)
    # Least squares are convex: with a bound broken, the optimum lies on one of the two borders.
    through_origin = summed((y - origin[executor] * x) ** 2) <= summed(dy * dy)
    broken = (slope < 0) | (fixed < 0) | (spread == 0)
    border = broken & through_origin & (squares > 0)
    return TimeModel(
        seconds_per_sample=np.where(broken, np.where(border, origin, 0.0), slope),
        fixed_s=np.where(broken, np.where(border, 0.0, mean_y), fixed),
    )


def parrot(problem: CohortProblem) -> CohortSchedule:
    """Clients by descending size, each to the executor that then leaves the smallest maximum load (Eq. 4).

    That maximum ties often: while the busiest executor stays the busiest, every other one gives the same. Ties go to
    the smaller `w_k + N_m t_k + b_k`, then to the executor with the smaller number; equal sizes in the cohort's order.
    """
    return scheduled(problem, longest_first(problem), algorithm="parrot")


def longest_first(problem: CohortProblem) -> Integers:
    """(clients,) the executor that Algorithm 3 gives each client; O(clients x executors).

    Eq. 4 with its ties broken is plainly the executor that would finish first: the executor with the smallest maximum
    has either the smallest finishing time, or ties with the executor that has it.
    """
    executor_of = np.empty(problem.clients, dtype=np.int64)
    load_s = np.zeros(problem.executors)
    finished_s = np.empty(problem.executors)
    for client in np.argsort(-problem.sizes, kind="stable"):
        np.multiply(problem.seconds_per_sample, problem.sizes[client], out=finished_s)
        finished_s += problem.fixed_s
        finished_s += load_s
        executor = int(finished_s.argmin())
        executor_of[client] = executor
        load_s[executor] = finished_s[executor]
    return executor_of


def uniform(problem: CohortProblem) -> CohortSchedule:
    """Equal numbers of clients per executor, to within one, in turn; sizes and times are not looked at."""
    executor_of = np.arange(problem.clients, dtype=np.int64) % problem.executors
    return scheduled(problem, executor_of, algorithm="uniform")
