"""Layers that are all alike: counting is exact, for ten thousand devices in milliseconds.

Within a limit T a device takes min(cap_d, floor((T - lat_d) / (s_d f))) layers, whatever the others do; T is enough
exactly where these add up to all layers. Bisection on T ends between two neighbouring floats.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from isthmus.cost.kernel import Floats, Ints
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation
from isthmus.units import format_size


class SearchCounters(NamedTuple):
    """What a device may take and how long that lasts; [devices] each."""

    room: Ints
    """Layers that its memory holds."""
    layer_s: Floats
    received_s: Floats
    overlaps: bool

    def workload_s(self, counts: Ints) -> Floats:
        compute = self.layer_s * counts
        both = np.maximum(compute, self.received_s) if self.overlaps else compute + self.received_s
        return np.where(counts > 0, both, 0.0)

    def within(self, limit_s: float) -> Ints:
        """Layers of each device within the limit; the quotient is only a guess, the workload decides."""
        left_s = np.maximum(limit_s - (0.0 if self.overlaps else self.received_s), 0.0)
        counts = np.minimum(left_s / self.layer_s, self.room).astype(np.int64)
        more = np.minimum(counts + 1, self.room)
        counts = np.where(self.workload_s(more) <= limit_s, more, counts)
        counts = np.where(self.workload_s(counts) <= limit_s, counts, np.maximum(counts - 1, 0))
        return np.where(self.received_s <= limit_s, counts, 0)


def identical(problem: LayerProblem) -> bool:
    """Whether one layer is like another in work, memory and what it receives."""
    columns = [problem.layer_flops, problem.layer_memory_bytes]
    if problem.transfers is not None:
        columns.append(problem.transfers.boundary_bytes)
    work = float(problem.layer_flops[0])
    return work > 0 and problem.memory_reach is None and all(bool((c == c[0]).all()) for c in columns)


def identical_layers(problem: LayerProblem) -> Allocation:
    """The exact optimum; devices that get layers stay in the order given. Raises FleetTooSmall."""
    devices = np.arange(problem.devices)
    counters = SearchCounters(
        room=problem.memory_end(devices, np.zeros_like(devices)),
        layer_s=problem.device_s_per_flop * problem.layer_flops[0],
        received_s=problem.received_s(devices, np.zeros_like(devices)),
        overlaps=problem.transfers is not None and problem.transfers.overlaps,
    )
    missing = problem.layers - int(counters.room.sum())
    if missing > 0:
        raise FleetTooSmall(
            f"{problem.layers} equal layers of {format_size(math.ceil(problem.layer_memory_bytes[0]))}: the devices "
            f"hold {problem.layers - missing} of them, so {missing} are without a place"
        )
    limit_s = _least_limit_s(counters, problem.layers)
    counts = counters.within(limit_s)
    # One float lower the layers do not fit: what is too much now is on devices that are exactly at the limit.
    at_limit = np.flatnonzero(counts > counters.within(math.nextafter(limit_s, 0.0)))
    counts[at_limit[: int(counts.sum()) - problem.layers]] -= 1
    return allocation(problem, devices.tolist(), counts.tolist(), limit_s)


def _least_limit_s(counters: SearchCounters, layers: int) -> float:
    low_s, high_s = 0.0, float((counters.layer_s + counters.received_s).max())
    while int(counters.within(high_s).sum()) < layers:
        low_s, high_s = high_s, 2 * high_s
    while low_s < (middle_s := (low_s + high_s) / 2) < high_s:
        if int(counters.within(middle_s).sum()) < layers:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s
