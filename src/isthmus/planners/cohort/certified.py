"""Ours: a schedule together with a lower bound on every schedule.

The fractional optimum bounds the makespan from below and says which executors suit which sizes. Two roundings give each
executor about the clients that it has there: one fills executors evenly, one keeps to the fractional shares. Exchanges
even out what is left. Where executors get few clients each, counting them raises the bound.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from isthmus.planners.cohort.exchange import exchange
from isthmus.planners.cohort.first_fit import smallest_fit
from isthmus.planners.cohort.fractional import fractional
from isthmus.planners.cohort.parrot import longest_first
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule, Floats, Integers, scheduled

TOLERANCE = 1e-3


def certified(problem: CohortProblem, *, steps: int | None = None) -> CohortSchedule:
    """A nearly shortest round, with a proof of how much shorter any other could be.

    Stops at a gap of `TOLERANCE`, or after `steps` exchanges from each rounding; without a number after so many that
    improvements become rare: an exchange mends one executor, and a few rounds mend all. Never longer than Parrot's
    schedule. Nothing is random or timed: the same problem gives the same schedule.
    """
    ascending = np.argsort(problem.sizes, kind="stable")
    ordered = replace(problem, sizes=problem.sizes[ascending])
    found, bound_s = _solve(ordered, 400 + 6 * problem.executors if steps is None else steps)
    executor_of = np.empty_like(found)
    executor_of[ascending] = found
    made = scheduled(problem, executor_of, algorithm="certified", lower_bound_s=bound_s)
    # A bound that is met exactly may lie above the makespan by the rounding of a sum.
    return replace(made, lower_bound_s=min(bound_s, made.makespan_s))


def _solve(problem: CohortProblem, steps: int) -> tuple[Integers, float]:
    """The schedule and the bound; the sizes are ascending."""

    def makespan_s(executor_of: Integers) -> float:
        return float(problem.load_s(executor_of).max())

    relaxed = fractional(problem)
    largest_s = float((problem.sizes[-1] * problem.seconds_per_sample + problem.fixed_s).min())
    greedy = longest_first(problem)
    bound_s = max(relaxed.lower_bound_s, largest_s)
    bound_s = counting_bound_s(problem, low_s=bound_s, high_s=makespan_s(greedy))
    stop_s = bound_s * (1 + TOLERANCE)
    fitted = smallest_fit(
        problem,
        relaxed.specialists[::-1],
        low_s=bound_s,
        high_s=makespan_s(greedy),
        precision=TOLERANCE / 4,
    )
    best = greedy
    for start in (fitted, relaxed.rounded):
        if makespan_s(best) > stop_s and start is not None:
            best = min(best, exchange(problem, start, stop_s=stop_s, steps=steps), key=makespan_s)
    return best, bound_s


MOST_COUNTS = 256
"""Values of j that are tried. Fewer make a weaker bound, not a wrong one."""
MOST_PER_EXECUTOR = 16
"""Clients per executor up to which the bound is worth its time: with more, the fractional one is closer."""
PRECISION = 1e-6


def counting_bound_s(problem: CohortProblem, *, low_s: float, high_s: float) -> float:
    """The largest limit between `low_s`, known to be a bound, and `high_s` that counting refutes, by bisection.

    It is for executors that get few clients each, where half a client is far from none. Of the j largest clients an
    executor trains within T at most as many as there are of the smallest of them that fit; if those numbers add up to
    less than j, no schedule ends by T. For j = executors + 1 this says that two of them meet on one executor; for
    j = 1, that the largest client must be trained somewhere.

    O(MOST_COUNTS executors) per step and client that an executor may get. The sizes are ascending.
    """
    if problem.clients > MOST_PER_EXECUTOR * problem.executors:
        return low_s
    counts = np.unique(np.linspace(1, problem.clients, min(problem.clients, MOST_COUNTS)).round().astype(np.int64))
    before = np.concatenate([[0.0], np.cumsum(problem.sizes)])
    # Numbers next to each other have no middle, and near 0 they may be further apart than the precision.
    while high_s - low_s > PRECISION * high_s and low_s < (middle_s := (low_s + high_s) / 2) < high_s:
        if _refuted(problem, before, counts, middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def _refuted(problem: CohortProblem, before: Floats, counts: Integers, limit_s: float) -> bool:
    """Whether for some j, of `counts`, the j largest clients are more than all executors can take."""
    first = problem.clients - counts
    held = np.zeros((len(counts), problem.executors), dtype=np.int64)
    for number in range(1, int(counts[-1]) + 1):
        end = np.minimum(first + number, problem.clients)
        seconds = np.outer(before[end] - before[first], problem.seconds_per_sample) + number * problem.fixed_s
        fits = (seconds <= limit_s) & (number <= counts)[:, None]
        if not fits.any():
            break
        held += fits
    return bool((held.sum(axis=1) < counts).any())
