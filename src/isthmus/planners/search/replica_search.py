"""Plans of several replicas from groupings that score well: each replica is cut for itself, then cuts move together."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations

from isthmus.cost import PlanLayout, Problem, build_replicas, preference
from isthmus.cost.blocks import Blocks, coarse
from isthmus.cost.network import FleetNetwork
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep
from isthmus.planners.search.fastest import fastest
from isthmus.planners.search.fixed_placement import fixed_placement_of
from isthmus.planners.search.groups import GroupScorer, ReplicaGrouping, every_grouping, groupings
from isthmus.planners.search.layout_search import shifted
from isthmus.planners.search.orders import scorer_of
from isthmus.plans import Plan

COUNTS_TRIED = 10
"""Numbers of replicas that are looked at: all small ones, then powers of two and the largest."""
MOST_EXHAUSTIVE = 5
"""Devices up to which every grouping is cut."""
MOST_CUT = 6
"""Groupings that are cut on larger fleets."""
MOST_SHIFTED = 4
"""Of these, how many have their cuts and shares moved together."""
PROMISING = 1.5
"""Times the best plan known: what scores or takes longer is not looked at any further."""
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
        gradient_bytes = self._gradient_bytes / self.problem.sync.period
        return GroupScorer(scorer_of(self.problem, self.network, rough), self.network, gradient_bytes)

    def replicated(self, single: Plan) -> Iterator[Plan]:
        """Plans of two replicas and more, each the best of its grouping; `single` is the best pipeline."""
        if self.problem.most_replicas < 2:
            return
        if self.problem.constraints.objective == "cost":
            single_s = fastest(self.problem).predicted.step_s
            worth = PROMISING * preference(self.problem, single)[0]
        else:
            single_s, worth = single.predicted.step_s, PROMISING * single.predicted.step_s
        cut = [layouts for grouping in self._groupings(single_s) if (layouts := self._cut(grouping)) is not None]
        plans = [(self._judged(x), n) for n, x in enumerate(cut)]
        for judged, number in sorted(plans)[:MOST_SHIFTED]:
            if judged <= worth:
                yield shifted(self.problem, cut[number], self.blocks.places)

    def cut(self, known_s: float) -> Iterator[Plan]:
        """The plans of the best groupings as they are cut, where some plan takes `known_s`."""
        for grouping in self._groupings(known_s)[:MOST_CUT] if self.problem.most_replicas > 1 else ():
            if (layouts := self._cut(grouping)) is not None:
                yield self._built(layouts)

    def _judged(self, layouts: list[PlanLayout]) -> float:
        return preference(self.problem, self._built(layouts))[0]

    def _built(self, layouts: list[PlanLayout]) -> Plan:
        return keep(build_replicas(self.problem, layouts, planner="auto"))

    def _groupings(self, single_s: float) -> list[ReplicaGrouping]:
        scorer = self._scorer
        devices, most = len(self.network.names), self.problem.most_replicas
        if devices <= MOST_EXHAUSTIVE:
            # Time leaves devices out where a group is cut; for money it matters already which are in a group.
            least = 2 if self.problem.constraints.objective == "cost" else devices
            sets = [chosen for size in range(least, devices + 1) for chosen in combinations(range(devices), size)]
            every = ((chosen, g) for chosen in sets for g in every_grouping(len(chosen)) if 1 < len(g) <= most)
            return [scorer.grouping([tuple(chosen[k] for k in order) for order in g]) for chosen, g in every]
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
                    plan = fastest(self.problem.on(fleet, share), settle=False)
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
