"""The best cut for one order of devices, any of which may stay empty: exact, by bisection and a table of places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.planners.baselines.allocation.problem import Allocation, Ints, LayerProblem, allocation
from isthmus.planners.baselines.allocation.windows import reach


def best_cut(problem: LayerProblem, order: Sequence[int], low_s: float, high_s: float) -> Allocation | None:
    """The smallest largest workload in this order, to a relative 1e-12; None where it is above `high_s`.

    `low_s` must not be above it, other than by rounding.
    """
    devices = np.array(order, dtype=np.int64)
    counts = cut_within(problem, devices, high_s)
    if counts is None:
        return None
    best = allocation(problem, order, counts)
    while best.workload_s > low_s * (1 + 1e-12):
        middle_s = (low_s + best.workload_s) / 2
        if not low_s < middle_s < best.workload_s:
            break
        counts = cut_within(problem, devices, middle_s)
        if counts is None:
            low_s = middle_s
        else:
            best = allocation(problem, order, counts)
    return best


def cut_within(problem: LayerProblem, order: Ints, limit_s: float) -> list[int] | None:
    """Layers of each device in this order with no workload above the limit, on few devices; None where it is too low.

    A greedy cut would do if a later start never cost more; what a device receives at a boundary can break that.
    """
    ends = reach(problem, limit_s, order)
    reached = np.zeros((len(order) + 1, problem.layers + 1), dtype=bool)
    reached[0, 0] = True
    for number, row in enumerate(ends):
        starts = np.flatnonzero(reached[number, :-1] & (row > np.arange(problem.layers)))
        change = np.bincount(starts + 1, minlength=problem.layers + 2)
        change -= np.bincount(row[starts] + 1, minlength=problem.layers + 2)
        reached[number + 1] = reached[number] | (np.cumsum(change)[:-1] > 0)
    if not reached[-1, -1]:
        return None
    counts = [0] * len(order)
    end = problem.layers
    for number in range(len(order) - 1, -1, -1):
        if not reached[number, end]:
            starts = np.flatnonzero(reached[number, :end] & (ends[number, :end] >= end))
            counts[number] = end - _narrowest(problem, starts)
            end -= counts[number]
    return counts


def _narrowest(problem: LayerProblem, starts: Ints) -> int:
    """Where the fewest bytes are received; the longest run among equals."""
    if problem.transfers is None:
        return int(starts[0])
    return int(starts[np.argmin(problem.transfers.boundary_bytes[starts])])
