"""Layer problems for the tests, and every allocation of them by brute force."""

from __future__ import annotations

from functools import cache

import numpy as np

from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation import Allocation, LayerProblem, Transfers


def layers_problem(
    flops: list[float],
    pace: list[float],
    *,
    memory: list[float] | None = None,
    sizes: list[float] | None = None,
    latency: list[float] | None = None,
    transfers: Transfers | None = None,
) -> LayerProblem:
    """`memory` is the devices', `sizes` are the layers'; both default to no limit."""
    return LayerProblem(
        layer_flops=np.array(flops, dtype=float),
        layer_memory_bytes=np.array(sizes or [1.0] * len(flops), dtype=float),
        device_s_per_flop=np.array(pace, dtype=float),
        device_memory_bytes=np.array(memory or [1e9] * len(pace), dtype=float),
        device_latency_s=np.array(latency or [0.0] * len(pace), dtype=float),
        transfers=transfers,
    )


def random_layers(seed: int, *, alike: bool = False, most_layers: int = 8, most_devices: int = 4) -> LayerProblem:
    """Any mix of latency, transfers, and memory as sums or as a table."""
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(1, most_layers + 1)), int(rng.integers(1, most_devices + 1))
    transfers = Transfers(
        boundary_bytes=np.full(layers, 2.0) if alike else rng.integers(0, 9, layers).astype(float),
        device_s_per_byte=rng.uniform(0, 0.5, devices),
    )
    table = np.minimum(layers, np.arange(layers) + rng.integers(0, layers + 1, (devices, layers)))
    return LayerProblem(
        layer_flops=np.full(layers, 3.0) if alike else rng.integers(0, 9, layers).astype(float),
        layer_memory_bytes=np.full(layers, 2.0) if alike else rng.integers(0, 9, layers).astype(float),
        device_s_per_flop=rng.choice([1.0, 2.0, rng.uniform(0.5, 4)], devices),
        device_memory_bytes=rng.integers(3, 40, devices).astype(float),
        device_latency_s=rng.choice([0.0, 1.0], devices) * rng.uniform(0, 4, devices),
        transfers=transfers if rng.random() < 0.6 else None,
        memory_reach=table if not alike and rng.random() < 0.3 else None,
    )


def naive_workload_s(problem: LayerProblem, device: int, start: int, end: int) -> float:
    compute = problem.device_s_per_flop[device] * sum(problem.layer_flops[start:end])
    received = problem.device_latency_s[device]
    if problem.transfers is None:
        return float(compute + received)
    received += problem.transfers.device_s_per_byte[device] * problem.transfers.boundary_bytes[start]
    return float(max(compute, received))


def naive_fits(problem: LayerProblem, device: int, start: int, end: int) -> bool:
    if problem.memory_reach is not None:
        return end <= problem.memory_reach[device, start]
    return sum(problem.layer_memory_bytes[start:end]) <= problem.device_memory_bytes[device]


def brute_force_s(problem: LayerProblem) -> float:
    """The least largest workload over all orders, subsets and cuts; infinite where nothing fits."""

    @cache
    def rest(start: int, used: int) -> float:
        if start == problem.layers:
            return 0.0
        best = float("inf")
        for device in range(problem.devices):
            for end in range(start + 1, problem.layers + 1):
                if not used >> device & 1 and naive_fits(problem, device, start, end):
                    here = naive_workload_s(problem, device, start, end)
                    best = min(best, max(here, rest(end, used | 1 << device)))
        return best

    return rest(0, 0)


def check(problem: LayerProblem, found: Allocation) -> None:
    """What every allocation promises, recomputed slowly."""
    assert len(set(found.order)) == len(found.order)
    assert sum(found.counts) == problem.layers
    assert min(found.counts) > 0
    start, worst = 0, 0.0
    for device, count in zip(found.order, found.counts, strict=True):
        assert naive_fits(problem, device, start, start + count)
        worst = max(worst, naive_workload_s(problem, device, start, start + count))
        start += count
    assert np.isclose(found.workload_s, worst, rtol=1e-9, atol=0)
    assert found.lower_bound_s <= found.workload_s


def attempt(make, problem: LayerProblem) -> Allocation | None:  # type: ignore[no-untyped-def]
    """None where the algorithm refuses."""
    try:
        return make(problem)
    except FleetTooSmall:
        return None
