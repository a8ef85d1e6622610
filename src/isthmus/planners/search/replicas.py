"""Starts of several replicas: groups of devices, each a pipeline, scored without cutting the model, then cut.

As in `orders`, every device takes work in proportion to its speed. Stages of different replicas that hold the same part
of the model then average it, over the links between them; so fast links are wanted inside groups for activations, and
between groups for gradients, and the search weighs one against the other (DT-FM, section 3, decides the same trade-off
for equal devices). The best groups are cut each for itself.

Beside these, plans in which every chosen device is a replica of its own. A device that computes w / v seconds per
micro-batch ends floor(T v / w) of them in T seconds, and

    step of a set = the least T with sum over its devices of floor(T v / w) >= n, plus what the set takes to average

Every set is looked at where devices are few; elsewhere a set grows by the device that makes its step shortest.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from isthmus.cost import PlanLayout, Problem, build_replicas, kernel, sync
from isthmus.cost.averaging import balanced_s
from isthmus.cost.blocks import Blocks, coarse
from isthmus.cost.network import FleetNetwork, Floats
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep, looked_at
from isthmus.planners.search.exhaustive import every_grouping, settles
from isthmus.planners.search.fixed_placement import fixed_placement_of
from isthmus.planners.search.local_search import first_improvement, nearest_tour, share_out
from isthmus.planners.search.one_pipeline import fastest
from isthmus.planners.search.orders import ROUNDING, Order, Scorer, improve, nearest_neighbour, scorer_of
from isthmus.plans import Plan, SyncGroup

MOST_MOVES = 600  # scores per improvement of one grouping: bounds the time, the same on every machine
SCORES_PER_ORDER = 200


class ReplicaGrouping(NamedTuple):
    """Replicas as orders of devices, the micro-batches of each, and the score in seconds per step."""

    orders: tuple[Order, ...]
    shares: tuple[int, ...]
    step_s: float


@dataclass(frozen=True)
class GroupScorer:
    """`gradient_bytes` are those of the whole model, in float32."""

    pipeline: Scorer
    network: FleetNetwork
    gradient_bytes: float

    def grouping(self, orders: Sequence[Order], worth_s: float = float("inf")) -> ReplicaGrouping:
        """Averaging is left out where the pipelines alone take `worth_s`."""
        times = [self._fill_and_period(order) for order in orders]
        shares = share_out(times, self.pipeline.micro_batches)
        slowest_s = max(kernel.step_s(*time, m) for time, m in zip(times, shares, strict=True))
        sync_s = balanced_s(self.network, orders, self.gradient_bytes) if slowest_s < worth_s else 0.0
        return ReplicaGrouping(tuple(orders), shares, slowest_s + sync_s)

    def shares_within(self, orders: Sequence[Order], most: Sequence[int]) -> tuple[int, ...]:
        """The micro-batches of each where memory holds no more than `most`."""
        return share_out([self._fill_and_period(order) for order in orders], self.pipeline.micro_batches, most)

    @cached_property
    def _fill_and_period(self) -> Callable[[Order], tuple[float, float]]:
        """Kept: a move changes one order or two, and the others come again."""
        return cache(self.pipeline.fill_and_period)


def groupings(scorer: GroupScorer, regions: Sequence[int], count: int, worth_s: float) -> list[ReplicaGrouping]:
    """Good groupings into `count` replicas, the best first. `regions` has the region's number per device.

    Those that begin with a score above `worth_s` are not improved.
    """
    seeds = [scorer.grouping(seed) for seed in dict.fromkeys(_seeds(scorer, regions, count))]
    better = [improved(scorer, seed) if seed.step_s <= worth_s else seed for seed in seeds]
    return sorted({tuple(sorted(g.orders)): g for g in better}.values(), key=lambda g: g.step_s)


def _seeds(scorer: GroupScorer, regions: Sequence[int], count: int) -> Iterator[tuple[Order, ...]]:
    tour = nearest_neighbour(scorer.pipeline, int(scorer.network.speed.argmax()))
    yield _ordered(scorer, _cut(tour, scorer.network.speed, count))
    # Replicas across the regions, so that what averages is near: deal the tour out like cards.
    yield _ordered(scorer, [tour[k::count] for k in range(count)])
    # The fastest regions, a replica each; and one region alone, dealt out.
    members: dict[int, list[int]] = {}
    for device, region in enumerate(regions):
        members.setdefault(region, []).append(device)
    by_speed = sorted(members.values(), key=lambda group: -float(scorer.network.speed[group].sum()))
    if 1 < count <= len(by_speed):
        yield _ordered(scorer, by_speed[:count])
    if count <= len(by_speed[0]) and len(by_speed) > 1:
        yield _ordered(scorer, [by_speed[0][k::count] for k in range(count)])
    # Equal speeds, whatever the links.
    groups: list[list[int]] = [[] for _ in range(count)]
    totals = np.zeros(count)
    for device in sorted(range(len(regions)), key=lambda d: -float(scorer.network.speed[d])):
        least = int(totals.argmin())
        groups[least].append(device)
        totals[least] += float(scorer.network.speed[device])
    yield _ordered(scorer, groups)


def _cut(tour: Order, speed: Floats, count: int) -> list[Order]:
    """Pieces of about equal speed, none empty."""
    done = np.cumsum(speed[list(tour)])
    cuts = [int(np.searchsorted(done, done[-1] * k / count)) + 1 for k in range(1, count)]
    for k in range(len(cuts)):
        cuts[k] = min(max(cuts[k], (cuts[k - 1] if k else 0) + 1), len(tour) - (count - 1 - k))
    return [tour[a:b] for a, b in itertools.pairwise((0, *cuts, len(tour)))]


def _ordered(scorer: GroupScorer, groups: Sequence[Sequence[int]]) -> tuple[Order, ...]:
    return tuple(_order(scorer, group) for group in groups)


def _order(scorer: GroupScorer, group: Sequence[int]) -> Order:
    """The group as a pipeline: from its fastest device to the nearest next one, then improved."""
    fastest = max(set(group), key=lambda d: float(scorer.network.speed[d]))
    return improve(scorer.pipeline, tuple(nearest_tour(scorer.pipeline.pair_s, fastest, group)), SCORES_PER_ORDER)


def improved(scorer: GroupScorer, grouping: ReplicaGrouping) -> ReplicaGrouping:
    """First improvement over swaps and moves of devices between replicas, or out of all, until none helps."""
    return first_improvement(
        grouping,
        lambda now: (scorer.grouping(other, now.step_s) for other in _neighbours(now.orders)),
        lambda now: now.step_s,
        most=MOST_MOVES,
        tolerance=ROUNDING,
    )


def _neighbours(orders: tuple[Order, ...]) -> Iterator[tuple[Order, ...]]:
    places = [(r, k) for r, order in enumerate(orders) for k in range(len(order))]
    for r, k in places:
        if len(orders[r]) > 1:
            without = orders[r][:k] + orders[r][k + 1 :]
            yield _with(orders, {r: without})
            for other, target in enumerate(orders):
                if other != r:
                    for at in range(len(target) + 1):
                        yield _with(orders, {r: without, other: (*target[:at], orders[r][k], *target[at:])})
    for (r, k), (s, j) in itertools.combinations(places, 2):
        first = _replaced(orders[r], k, orders[s][j])
        if r != s:
            yield _with(orders, {r: first, s: _replaced(orders[s], j, orders[r][k])})
        else:
            yield _with(orders, {r: _replaced(first, j, orders[r][k])})


def _replaced(order: Order, place: int, device: int) -> Order:
    return (*order[:place], device, *order[place + 1 :])


def _with(orders: tuple[Order, ...], changed: dict[int, Order]) -> tuple[Order, ...]:
    return tuple(changed.get(r, order) for r, order in enumerate(orders))


COUNTS_TRIED = 10  # numbers of replicas that are looked at: all small ones, then powers of two and the largest
MOST_EXHAUSTIVE = 5  # devices up to which every grouping is cut
MOST_CUT = 6  # groupings that are cut on larger fleets
MOST_EVEN = 2  # groupings that are cut a second time
PROMISING = 1.5  # times the best plan known: what scores or takes longer is not looked at any further
ROUGH_BLOCKS = 64


class ReplicaSearch:
    """One problem, by groupings: any objective, any terms."""

    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks) -> None:
        self.problem, self.network, self.blocks = problem, network, blocks
        self.fixed_placement = fixed_placement_of(problem, network)
        self._regions = [problem.fleet.regions.index(device.region) for device in problem.fleet.devices]
        self._pipelines: dict[tuple[frozenset[int], int], PlanLayout | None] = {}
        self._gradient_bytes = float(sum(variable.gradient_bytes for variable in self.blocks.variables))

    @cached_property
    def _scorer(self) -> GroupScorer:
        rough = coarse(self.blocks, ROUGH_BLOCKS)
        gradient_bytes = self._gradient_bytes / self.problem.sync.every
        return GroupScorer(scorer_of(self.problem, self.network, rough), self.network, gradient_bytes)

    def cut(self, known_s: float) -> Iterator[Plan]:
        """The plans of the best groupings as they are cut, where some plan takes `known_s`."""
        if self.problem.most_replicas < 2:
            return
        if self.problem.constraints.objective == "cost":
            known_s = fastest(self.problem, thorough=False).predicted.step_s
        found = self._groupings(known_s)
        # Where time alone counts, nearly all small fleets are settled before.
        for number, grouping in enumerate(found[:MOST_CUT] if settles(self.problem) else found):
            if (layouts := self._cut(grouping)) is not None:
                yield self._built(layouts)
            if number < MOST_EVEN and (layouts := self._evenly_cut(grouping)) is not None:
                yield self._built(layouts)

    def _built(self, layouts: list[PlanLayout]) -> Plan:
        return keep(build_replicas(self.problem, layouts, planner="auto"))

    def _groupings(self, single_s: float) -> list[ReplicaGrouping]:
        scorer = self._scorer
        devices, most = len(self.network.names), self.problem.most_replicas
        if devices <= MOST_EXHAUSTIVE:
            # Time leaves devices out where a group is cut; for money it matters already which are in a group.
            least = 2 if self.problem.constraints.objective == "cost" else devices
            every = (g for g in every_grouping(range(devices)) if 1 < len(g) <= most and sum(map(len, g)) >= least)
            made = [scorer.grouping([tuple(sorted(members)) for members in g]) for g in every]
            return sorted(made, key=lambda g: g.step_s)
        worth_s = PROMISING * single_s
        free = [g for n in replica_counts(most) for g in groupings(scorer, self._regions, n, worth_s)]
        pinned = [scorer.grouping(self.fixed_placement.dealt(g.orders)) for g in free]
        return sorted((g for g in pinned if g.step_s <= worth_s), key=lambda g: g.step_s)[:MOST_CUT]

    def _cut(self, grouping: ReplicaGrouping) -> list[PlanLayout] | None:
        """Each replica cut for itself, with a share that fits; None where there is none."""
        layouts = self._cut_with(grouping, grouping.shares)
        if layouts is not None or self.problem.schedule != "gpipe":
            return layouts
        most = [self._largest_share(frozenset(order)) for order in grouping.orders]
        if min(most) < 1 or sum(most) < self.problem.micro_batches:
            return None
        return self._cut_with(grouping, self._scorer.shares_within(grouping.orders, most))

    def _cut_with(self, grouping: ReplicaGrouping, shares: Sequence[int]) -> list[PlanLayout] | None:
        layouts = [self._pipeline(frozenset(o), m) for o, m in zip(grouping.orders, shares, strict=True)]
        return [layout for layout in layouts if layout is not None] if None not in layouts else None

    def _evenly_cut(self, grouping: ReplicaGrouping) -> list[PlanLayout] | None:
        """Each replica cut as if it had all micro-batches: into more stages, which average less each. With a share of
        few, a pipeline is quickest where one device has nearly all."""
        layouts = self._cut_with(grouping, [self.problem.micro_batches] * len(grouping.shares))
        return layouts and [x._replace(micro_batches=m) for x, m in zip(layouts, grouping.shares, strict=True)]

    def _largest_share(self, devices: frozenset[int]) -> int:
        """The most micro-batches that fit under gpipe, which holds all of a replica's."""
        return bisect_left(
            range(1, self.problem.micro_batches + 1), True, key=lambda share: self._pipeline(devices, share) is None
        )

    def _pipeline(self, devices: frozenset[int], share: int) -> PlanLayout | None:
        if (devices, share) not in self._pipelines:
            layout = None
            if devices & set(self.fixed_placement.holders):
                fleet = self.problem.fleet.subset(self.network.names[d] for d in devices)
                with contextlib.suppress(FleetTooSmall):
                    plan = fastest(self.problem.on(fleet, share), thorough=False)
                    layout = PlanLayout(tuple(stage.device for stage in plan.stages), tuple(plan.boundaries()), share)
            self._pipelines[devices, share] = layout
        return self._pipelines[devices, share]


def replica_counts(most: int) -> list[int]:
    """Numbers of replicas from 2 to `most`: few enough to try, the extremes among them."""
    counts = {*range(2, min(most, COUNTS_TRIED // 2) + 1), most}
    power = 8
    while power < most and len(counts) < COUNTS_TRIED:
        counts.add(power)
        power *= 2
    return sorted(c for c in counts if 2 <= c <= most)


MOST_SETS_OF = 7  # devices up to which every set is looked at
MOST_TRIED = 6  # devices of which one joins a set
MOST_BUILT = 3  # plans that are built, the best first; the first may not fit

Chosen = tuple[int, ...]


def replicas_per_device(problem: Problem) -> Iterator[Plan]:
    """The best plans of this kind, of two replicas and more."""
    if problem.most_replicas < 2:
        return
    fleet = problem.fleet.subset(problem.constraints.data_holders or problem.fleet.names)
    work, names = problem.cumulative_flops[-1], fleet.names
    each_s = [work / device.sustained_flops_per_s for device in fleet.devices]
    ops = problem.flow.graph.ops
    trained = [op.name for op in ops if op.kind == "parameter" and any(op.requires_grad)]
    size_bytes = sync.buffer_bytes(problem.flow, trained, "gradients")

    def shares(chosen: Chosen) -> tuple[int, ...]:
        return share_out([(each_s[d], each_s[d]) for d in chosen], problem.micro_batches)

    @cache
    def step_s(chosen: Chosen) -> float:
        looked_at()
        # the least T with sum of floor(T v / w) >= n, and then the averaging
        longest_s = max(each_s[d] * share for d, share in zip(chosen, shares(chosen), strict=True))
        devices = tuple(names[d] for d in chosen)
        group = SyncGroup(devices=devices, parameters=(), iterations=(0,), size_bytes=size_bytes)
        return longest_s + sync.sum_time(fleet, sync.fastest(fleet, group)).alone_s / problem.sync.every

    for chosen in sorted(_sets(each_s, problem.most_replicas, step_s), key=step_s)[:MOST_BUILT]:
        layouts = [PlanLayout((names[d],), (), m) for d, m in zip(chosen, shares(chosen), strict=True)]
        with contextlib.suppress(FleetTooSmall):
            yield keep(build_replicas(problem, layouts, planner="auto"))


def _sets(each_s: Sequence[float], most: int, step_s: Callable[[Chosen], float]) -> list[Chosen]:
    """Sets of devices that are looked at, of two to `most`; a micro-batch takes each device so long."""
    if len(each_s) <= MOST_SETS_OF:
        return [c for size in range(2, most + 1) for c in itertools.combinations(range(len(each_s)), size)]
    by_speed = sorted(range(len(each_s)), key=lambda d: (each_s[d], d))
    found: list[Chosen] = [min(itertools.combinations(sorted(by_speed[:MOST_TRIED]), 2), key=step_s)]
    while len(found[-1]) < most:
        left = [d for d in by_speed if d not in found[-1]][:MOST_TRIED]
        found.append(min((tuple(sorted((*found[-1], d))) for d in left), key=step_s))
    return found
