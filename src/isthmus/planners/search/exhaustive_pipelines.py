"""Every pipeline of a small fleet, tried one by one: where no sum over stages gives what is minimised.

Where memory binds, a stage's own memory, its round trip and the period depend on each other; where two stages share a
device, so do their times; and money depends on all devices at once. Pipelines are tried in the order of what compute
alone says they cannot undercut. The first bound that is no better than the best plan ends the search; what the budget
leaves open shows in the lower bound.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from isthmus.cost import Problem, build_plan, preference
from isthmus.cost.blocks import Blocks
from isthmus.cost.limits import broken_constraint
from isthmus.cost.network import FleetNetwork
from isthmus.cost.price import GB, SECONDS_PER_HOUR
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep, looked_at
from isthmus.planners.search.exact_cut import Label, next_label, received
from isthmus.planners.search.fixed_placement import fixed_placement_of
from isthmus.planners.search.greedy_fill import stage_bytes
from isthmus.planners.search.threshold_search import TOLERANCE
from isthmus.plans import Plan

MOST_CANDIDATES = 150_000
"""Orders times cuts. With more, the fleet or the model is not small."""
MOST_STAGES = 60_000
"""Looked at on the way to the candidates."""
MOST_PLANS = 3_000

Candidate = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Bound, devices, block boundaries."""


@dataclass(frozen=True)
class ProvenPipeline:
    """The best plan, if any fits, and what no pipeline undercuts: seconds or money, by the problem's objective."""

    plan: Plan | None
    bound: float


def exhaustive_pipeline(
    problem: Problem, network: FleetNetwork, blocks: Blocks, known: float, *, judged: Problem | None = None
) -> ProvenPipeline | None:
    """The best pipeline, or none that beats `known`; None where there are too many to try.

    Plans are those of `judged`, by default the problem itself: no pipeline of it does better than in the problem.
    """
    judged = judged or problem
    found: list[Candidate] = []
    tariff = _Tariff(problem, network)
    try:
        for candidate in _candidates(problem, blocks, tariff, known):
            found.append(candidate)
            if len(found) > MOST_CANDIDATES:
                return None
    except _TooManyPipelines:
        return None
    heapq.heapify(found)
    best, least = None, known
    for _ in range(MOST_PLANS):
        if not found or found[0][0] >= least * (1 - TOLERANCE):
            return ProvenPipeline(best, least)
        looked_at()
        _, devices, cut = heapq.heappop(found)
        order, boundaries = [network.names[d] for d in devices], blocks.boundaries(cut)
        if judged is not problem and broken_constraint(judged, order, boundaries) is not None:
            continue
        try:
            plan = build_plan(judged, order, boundaries, planner="chain")
        except FleetTooSmall:
            continue
        if preference(judged, plan)[0] < least:
            best, least = keep(plan), preference(judged, plan)[0]
    return ProvenPipeline(best, min([least, *(bound for bound, _, _ in found[:1])]))


class _TooManyPipelines(Exception):
    """Stages looked at."""


class _Tariff:
    """What a second costs on some devices, and a message between two: one and nothing where time is minimised."""

    def __init__(self, problem: Problem, network: FleetNetwork) -> None:
        self.network = network
        self._micro_batches = problem.micro_batches
        self._priced = problem.constraints.objective == "cost"
        fleet = problem.fleet
        self._hour = [device.price_per_hour for device in fleet.devices]
        self._region = [device.region for device in fleet.devices]
        self._gb = [fleet.region_info_of(device.region).egress_price_per_gb for device in fleet.devices]
        self._egress = self._priced and any(self._gb)

    def second(self, devices: tuple[int, ...]) -> float:
        return sum(self._hour[d] for d in set(devices)) / SECONDS_PER_HOUR if self._priced else 1.0

    def messages(self, blocks: Blocks, devices: tuple[int, ...], cut: tuple[int, ...]) -> float:
        """Of one step. Shared parameters are left out: this is for a bound."""
        total = 0.0
        label: Label = ()
        if not self._egress:
            return total
        for device, (start, end) in zip(devices, pairwise((0, *cut, blocks.count)), strict=True):
            sent, _ = received(blocks, self.network, label, start, end, device)
            for holder, (forward, backward) in sent.items():
                if self._region[holder] != self._region[device]:
                    total += forward * self._gb[holder] + backward * self._gb[device]
            label = next_label(blocks, label, start, end, device)
        return total * self._micro_batches / GB


def _candidates(problem: Problem, blocks: Blocks, tariff: _Tariff, known: float) -> Iterator[Candidate]:
    """Pipelines whose stages fit with one micro-batch each and whose compute alone is below `known`."""
    network = tariff.network
    fixed_placement = fixed_placement_of(problem, network)
    stages = itertools.count(1)
    for count in range(1, min(len(network.names) + fixed_placement.labels_stay, blocks.count) + 1):
        for devices in fixed_placement.pipelines(range(len(network.names)), count):
            second = tariff.second(devices)
            known_s = known / second if second else float("inf")
            for cut in _cuts(problem, network, blocks, devices, known_s, stages):
                bound = second * _bound_s(problem, network, blocks, devices, cut)
                yield bound + tariff.messages(blocks, devices, cut), devices, cut


def _cuts(
    problem: Problem,
    network: FleetNetwork,
    blocks: Blocks,
    devices: tuple[int, ...],
    known_s: float,
    stages: Iterator[int],
) -> Iterator[tuple[int, ...]]:
    gain = problem.micro_batches - 1
    latest = blocks.last_start

    def extend(cut: tuple[int, ...], spent_s: float, slowest_s: float) -> Iterator[tuple[int, ...]]:
        start, stage = (cut[-1] if cut else 0), len(cut)
        device, last = devices[stage], stage == len(devices) - 1
        ends = [blocks.count] if last else range(start + 1, blocks.count - (len(devices) - stage - 2))
        if last and start > latest:
            return
        for end in ends:
            if next(stages) > MOST_STAGES:
                raise _TooManyPipelines
            looked_at()
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
    problem: Problem, network: FleetNetwork, blocks: Blocks, devices: tuple[int, ...], cut: tuple[int, ...]
) -> float:
    """The closed form without links."""
    busy: dict[int, float] = {}
    for d, (a, b) in zip(devices, pairwise((0, *cut, blocks.count)), strict=True):
        busy[d] = busy.get(d, 0.0) + float(blocks.work[b] - blocks.work[a]) / float(network.speed[d])
    return sum(busy.values()) + (problem.micro_batches - 1) * max(busy.values())
