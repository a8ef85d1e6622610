"""Allocations that keep the devices in the order given: the baselines of Sky Computing and FusionLLM.

Sky Computing's heuristic (section IV-D, Algorithms 1 and 2) moves boundaries between neighbours. Where the text is
silent the authors' public `allocator.py` decides: boundaries are visited in order, a layer moves at once, and the
target is the mean at the start of a sweep. We leave its slip: there "the next device is below the target" looks at the
device itself, so that no layer is ever given away; here it looks at the next device, as the text says.
"""

from __future__ import annotations

import itertools

import numpy as np

from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation, too_small
from isthmus.planners.observer import looked_at

MOST_SWEEPS = 1_000
"""The default of the public code."""


def best_in_order(problem: LayerProblem) -> Allocation:
    """The best of the three. Raises the last refusal where none fits."""
    found: list[Allocation] = []
    refused: list[FleetTooSmall] = []
    for make in (even_layers, equal_compute_layers, sky_heuristic_layers):
        try:
            found.append(make(problem))
        except FleetTooSmall as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    return min(found, key=lambda a: a.workload_s)


def even_layers(problem: LayerProblem) -> Allocation:
    """Sky Computing's baseline (section IV-A): the same number of layers on every device, the larger counts first.

    With more devices than layers the last get none. Knows neither speed nor memory, as in the paper. Raises
    FleetTooSmall where a device cannot hold its share.
    """
    return allocation(problem, range(problem.devices), even_counts(problem))


def even_counts(problem: LayerProblem) -> list[int]:
    share, left = divmod(problem.layers, problem.devices)
    return [share + (device < left) for device in range(problem.devices)]


def equal_compute_layers(problem: LayerProblem) -> Allocation:
    """FusionLLM's baseline: boundary k is the place nearest to the first k devices' share of the FLOPs.

    A device may get nothing. Knows no memory, latency or transfer. Raises FleetTooSmall where a device cannot hold
    its share.
    """
    speed = np.cumsum(1.0 / problem.device_s_per_flop)
    wanted = problem.flops_before[-1] * speed[:-1] / speed[-1]
    after = np.searchsorted(problem.flops_before, wanted)
    before = np.maximum(after - 1, 0)
    nearer = wanted - problem.flops_before[before] < problem.flops_before[after] - wanted
    boundaries = np.concatenate(([0], np.where(nearer, before, after), [problem.layers]))
    return allocation(problem, range(problem.devices), np.diff(boundaries).tolist())


def sky_heuristic_layers(problem: LayerProblem) -> Allocation:
    """Coarse allocation until memory holds, then fine-tuning towards the mean workload, in the order given.

    Steers by the paper's literal workload `dt_i * lf_j + ct_i` per layer. Every device keeps one layer at least; with
    more devices than layers the last ones get none. Raises FleetTooSmall where no move repairs the memory.
    """
    cut = list(itertools.accumulate(even_counts(problem), initial=0))
    cut = cut[: min(problem.devices, problem.layers) + 1]
    coarse(problem, cut)
    fine(problem, cut)
    counts = [end - start for start, end in itertools.pairwise(cut)]
    return allocation(problem, range(len(counts)), counts)


def coarse(problem: LayerProblem, cut: list[int]) -> None:
    """Algorithm 1, in place: a device over its memory gives layers to the next, one with room takes from it."""
    devices = len(cut) - 1
    crowded = {d for d in range(devices) if not problem.fits(d, cut[d], cut[d + 1])}

    def move(boundary: int, step: int) -> None:
        cut[boundary] += step
        for d in (boundary - 1, boundary):
            (crowded.discard if problem.fits(d, cut[d], cut[d + 1]) else crowded.add)(d)

    for _ in range(MOST_SWEEPS):
        looked_at()
        before = cut[:]
        for d in range(devices - 1):
            while crowded and d in crowded and cut[d + 1] - cut[d] > 1:
                move(d + 1, -1)
            while crowded and cut[d + 2] - cut[d + 1] > 1 and problem.fits(d, cut[d], cut[d + 1] + 1):
                move(d + 1, +1)
        if not crowded:
            return
        if cut == before:
            break
    d = min(crowded)
    raise too_small(problem, d, cut[d], cut[d + 1])


def fine(problem: LayerProblem, cut: list[int]) -> None:
    """Algorithm 2, in place."""
    flops, devices = problem.flops_before.tolist(), len(cut) - 1
    pace, latency = problem.device_s_per_flop.tolist(), problem.device_latency_s.tolist()

    def load(d: int, start: int, end: int) -> float:
        return pace[d] * (flops[end] - flops[start]) + latency[d] * (end - start)

    for _ in range(MOST_SWEEPS):
        looked_at()
        before = cut[:]
        target = sum(load(d, cut[d], cut[d + 1]) for d in range(devices)) / devices
        for d in range(devices - 1):
            start, end, next_end = cut[d : d + 3]
            if load(d, start, end) < target:
                if next_end - end > 1 and problem.fits(d, start, end + 1):
                    cut[d + 1] += 1
            elif (
                end - start > 1
                and load(d + 1, end, next_end) < target < load(d, start, end - 1)
                and problem.fits(d + 1, end - 1, next_end)
            ):
                cut[d + 1] -= 1
        if cut == before:
            return
