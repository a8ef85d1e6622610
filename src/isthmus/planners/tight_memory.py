"""Every pipeline of a small fleet, where memory decides how many micro-batches are in flight.

Then a stage's own memory, its round trip and the period depend on each other, and no sum over stages gives the step
time: pipelines are tried one by one, in the order of what compute alone says they cannot undercut. The first bound that
is no better than the best plan ends the search; what the budget leaves open shows in the lower bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations

from isthmus.cost import Problem, build_plan
from isthmus.errors import FleetTooSmall
from isthmus.plan import Plan
from isthmus.planners.blocks import Blocks
from isthmus.planners.greedy_fill import stage_bytes
from isthmus.planners.network import Network
from isthmus.planners.threshold_search import TOLERANCE

MOST_CANDIDATES = 150_000
"""Orders times cuts. With more, the fleet or the model is not small."""
MOST_PLANS = 3_000

Candidate = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Bound in seconds, devices, block boundaries."""


@dataclass(frozen=True)
class Proven:
    """The best plan, if any fits, and the seconds that no pipeline undercuts."""

    plan: Plan | None
    bound_s: float


def every_pipeline(problem: Problem, network: Network, blocks: Blocks, known_s: float) -> Proven | None:
    """The best pipeline, or none that beats `known_s`; None where there are too many to try."""
    found: list[Candidate] = []
    for candidate in _candidates(problem, network, blocks, known_s):
        found.append(candidate)
        if len(found) > MOST_CANDIDATES:
            return None
    heapq.heapify(found)
    best, best_s = None, known_s
    for _ in range(MOST_PLANS):
        if not found or found[0][0] >= best_s * (1 - TOLERANCE):
            return Proven(best, best_s)
        _, devices, cut = heapq.heappop(found)
        try:
            plan = build_plan(
                problem, [network.names[d] for d in devices], blocks.boundaries(cut), planner="chain"
            )
        except FleetTooSmall:
            continue
        if plan.predicted.step_s < best_s:
            best, best_s = plan, plan.predicted.step_s
    return Proven(best, min([best_s, *(bound for bound, _, _ in found[:1])]))


def _candidates(problem: Problem, network: Network, blocks: Blocks, known_s: float) -> Iterator[Candidate]:
    """Pipelines whose stages fit with one micro-batch each and whose compute alone is below `known_s`."""
    for count in range(1, min(len(network.names), blocks.count) + 1):
        for devices in permutations(range(len(network.names)), count):
            for cut in _cuts(problem, network, blocks, devices, known_s):
                yield _bound_s(problem, network, blocks, devices, cut), devices, cut


def _cuts(
    problem: Problem, network: Network, blocks: Blocks, devices: tuple[int, ...], known_s: float
) -> Iterator[tuple[int, ...]]:
    gain = problem.micro_batches - 1

    def extend(cut: tuple[int, ...], spent_s: float, slowest_s: float) -> Iterator[tuple[int, ...]]:
        start, stage = (cut[-1] if cut else 0), len(cut)
        device, last = devices[stage], stage == len(devices) - 1
        ends = [blocks.count] if last else range(start + 1, blocks.count - (len(devices) - stage - 2))
        for end in ends:
            compute_s = float(blocks.work[end] - blocks.work[start]) / float(network.speed[device])
            longest_s = max(slowest_s, compute_s)
            too_large = stage_bytes(blocks, start, end, 1) > network.memory[device]
            if too_large or spent_s + compute_s + gain * longest_s >= known_s:
                return  # a longer stage is larger and slower still
            if last:
                yield cut
            else:
                yield from extend((*cut, end), spent_s + compute_s, longest_s)

    yield from extend((), 0.0, 0.0)


def _bound_s(
    problem: Problem, network: Network, blocks: Blocks, devices: tuple[int, ...], cut: tuple[int, ...]
) -> float:
    """The closed form without links."""
    stages = [
        float(blocks.work[b] - blocks.work[a]) / float(network.speed[d])
        for d, (a, b) in zip(devices, pairwise((0, *cut, blocks.count)), strict=True)
    ]
    return sum(stages) + (problem.micro_batches - 1) * max(stages)
