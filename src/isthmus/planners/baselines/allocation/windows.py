"""Windows: for a limit on the workload, how far a device gets from each layer on; and so the best cut of one order.

A run may always be cut short on the right, so an allocation below the limit exists exactly where one maximal window per
device, at most, covers all layers: sort the windows by start and cut each where the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost.kernel import Ints
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation


class Windows(NamedTuple):
    """Maximal runs, [windows] each; those inside an earlier window of the same device are left out."""

    device: Ints
    start: Ints
    end: Ints


def reach(problem: LayerProblem, limit_s: float, order: Ints | None = None) -> Ints:
    """[devices of `order`, layers]: the furthest end within memory and `limit_s`; the start itself where none is."""
    devices = np.arange(problem.devices) if order is None else order
    starts = np.arange(problem.layers)[None, :]
    received, memory_ends = problem.received_table_s, problem.memory_end_table
    if order is not None:
        received, memory_ends = received[order], memory_ends[order]
    overlaps = problem.transfers is not None and problem.transfers.overlaps
    seconds = np.where(received <= limit_s, limit_s, -1.0) if overlaps else limit_s - received
    done = problem.flops_before[:-1] + seconds / problem.device_s_per_flop[devices, None]
    # One layer too far for the sake of rounding, and back where the workload is really above.
    ends = np.searchsorted(problem.flops_before, done * (1 + 1e-12), side="right") - 1
    ends = np.maximum(np.minimum(ends, memory_ends), starts)
    while (over := problem.workload_s(devices[:, None], starts, ends) > limit_s).any():
        ends -= over
    return ends


def windows(ends: Ints, allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None = None) -> Windows:
    """The maximal windows of a table that `reach` made, or those of them that are `allowed`."""
    useful = ends > np.arange(ends.shape[1])
    # Of windows with one end the earliest start covers the most.
    useful[:, 1:] &= ends[:, 1:] != ends[:, :-1]
    if allowed is not None:
        useful &= allowed
    device, start = np.nonzero(useful)
    return Windows(device, start, ends[device, start])


def ordered(chosen: Windows) -> list[int]:
    """Devices of a cover by start, without those whose window lies inside another."""
    found: list[int] = []
    covered = 0
    for index in np.lexsort((-chosen.end, chosen.start)).tolist():
        if chosen.end[index] > covered:
            found.append(int(chosen.device[index]))
            covered = int(chosen.end[index])
    return found


def best_cut(problem: LayerProblem, order: Sequence[int], low_s: float, high_s: float) -> Allocation | None:
    """The smallest largest workload in this order, to a relative 1e-12; None where it is above `high_s`.

    Any device may stay empty. Exact, by bisection and a table of places. `low_s` must not be above it, other than by
    rounding.
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
