"""Windows: for a limit on the workload, how far a device gets from each layer on.

A run may always be cut short on the right, so an allocation below the limit exists exactly where one maximal window per
device, at most, covers all layers: sort the windows by start and cut each where the next begins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from isthmus.planners.baselines.allocation.problem import Ints, LayerProblem


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
