"""A lower bound for executors that get few clients each, where half a client is far from none.

Of the j largest clients an executor trains within T at most as many as there are of the smallest of them that fit; if
those numbers add up to less than j, no schedule ends by T. For j = executors + 1 this says that two of them meet on
one executor; for j = 1, that the largest client must be trained somewhere.
"""

from __future__ import annotations

import numpy as np

from isthmus.planners.cohort.problem import CohortProblem, Floats, Integers

MOST_COUNTS = 256
"""Values of j that are tried. Fewer make a weaker bound, not a wrong one."""
MOST_PER_EXECUTOR = 16
"""Clients per executor up to which the bound is worth its time: with more, the fractional one is closer."""
PRECISION = 1e-6


def counting_bound_s(problem: CohortProblem, *, low_s: float, high_s: float) -> float:
    """The largest limit between `low_s`, known to be a bound, and `high_s` that the argument refutes, by bisection.

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
