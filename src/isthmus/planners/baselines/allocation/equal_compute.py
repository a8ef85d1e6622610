"""FusionLLM's equal-compute baseline: devices in the order given, each with FLOPs in proportion to its speed."""

from __future__ import annotations

import numpy as np

from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation


def equal_compute_layers(problem: LayerProblem) -> Allocation:
    """Boundary k is the place nearest to the first k devices' share of the FLOPs; a device may get nothing.

    Knows no memory, latency or transfer. Raises FleetTooSmall where a device cannot hold its share.
    """
    speed = np.cumsum(1.0 / problem.device_s_per_flop)
    wanted = problem.flops_before[-1] * speed[:-1] / speed[-1]
    after = np.searchsorted(problem.flops_before, wanted)
    before = np.maximum(after - 1, 0)
    nearer = wanted - problem.flops_before[before] < problem.flops_before[after] - wanted
    boundaries = np.concatenate(([0], np.where(nearer, before, after), [problem.layers]))
    return allocation(problem, range(problem.devices), np.diff(boundaries).tolist())
