"""How many replicas, which devices in which, where each is cut, and who takes how much of the batch.

Groupings that score well (`groups`) are cut exactly, replica by replica, by `chain`; then cuts are moved together,
because replicas that are cut alike average with fewer partners. What is found is judged by the closed form of `cost`,
and the best few by the scorer that the caller injects, if any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from isthmus.cost import Layout, Problem, build_replicas
from isthmus.errors import FleetTooSmall, UserError
from isthmus.plan import Plan
from isthmus.planners.allocation.on_fleet import certified, equal_compute, sky_heuristic
from isthmus.planners.blocks import Blocks, coarse
from isthmus.planners.bounds import step_certificate
from isthmus.planners.chain import chain
from isthmus.planners.groups import Grouping, GroupScorer, every_grouping, groupings
from isthmus.planners.layout_search import shifted
from isthmus.planners.network import network_of
from isthmus.planners.op_fence import op_fence
from isthmus.planners.orders import scorer_of
from isthmus.planners.placement.on_fleet import islands, random
from isthmus.planners.replica_bound import replicas_bound_s

COUNTS_TRIED = 10
"""Numbers of replicas that are looked at: all small ones, then powers of two and the largest."""
MOST_EXHAUSTIVE = 5
"""Devices up to which every grouping is cut exactly."""
MOST_CUT = 6
"""Groupings that are cut exactly on larger fleets."""
MOST_SHIFTED = 4
"""Of these, how many have their cuts and shares moved together."""
MOST_SCORED = 3
"""Plans that the scorer judges."""
PROMISING = 1.5
"""Times the best single pipeline: what scores or takes longer is not looked at any further."""
ROUGH_BLOCKS = 64
OTHERS = (equal_compute, sky_heuristic, certified, op_fence, random)
MOST_PLACED = 16
"""Devices up to which `islands`, which takes a second for each number of stages, is asked too."""
SCOPE = (
    "any number of replicas, any devices, orders, cuts and shares of the batch; the bound pools speeds and takes the "
    "best links, so the gap is what is not proven"
)

Score = Callable[[Plan], float]
"""Seconds per step of a plan, from whoever knows better than the closed form: the simulator."""


def auto(problem: Problem, score: Score | None = None) -> Plan:
    """The fastest plan found over any number of replicas, with a lower bound on all plans.

    Raises FleetTooSmall with the device that is short, and by how much: a model that no single pipeline holds, no
    replicas hold either.
    """
    search, single = _Search(problem), chain(problem)
    plans = sorted([single, *search.replicated(_step_s(single)), *_others(problem)], key=_step_s)
    if score is not None:
        plans = sorted(plans[:MOST_SCORED], key=score)
    proven_s = single.certificate.lower_bound_s if single.certificate else 0.0
    return _certified(problem, plans[0], min(proven_s, search.replicas_bound_s()))


def _others(problem: Problem) -> Iterator[Plan]:
    """What the other planners make of it, as far as they are quick."""
    small = len(problem.fleet.names) <= MOST_PLACED
    for planner in (*OTHERS, *((islands,) if small else ())):
        with contextlib.suppress(UserError):  # it does not fit their way, or the devices do not factor
            yield planner(problem)


def _step_s(plan: Plan) -> float:
    return plan.predicted.step_s


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.network = network_of(problem)
        self.blocks = Blocks(problem)
        self._regions = [problem.fleet.regions.index(device.region) for device in problem.fleet.devices]
        self._pipelines: dict[tuple[frozenset[int], int], Layout | None] = {}
        self._gradient_bytes = float(sum(variable.gradient_bytes for variable in self.blocks.variables))

    def replicas_bound_s(self) -> float:
        return replicas_bound_s(
            self.network, self.blocks, self.problem.micro_batches, self._gradient_bytes, self.problem.sync.period
        )

    def replicated(self, single_s: float) -> Iterator[Plan]:
        """Plans of two replicas and more, each the best of its grouping, where one pipeline takes `single_s`."""
        rough = coarse(self.blocks, ROUGH_BLOCKS)
        gradient_bytes = self._gradient_bytes / self.problem.sync.period
        scorer = GroupScorer(scorer_of(self.problem, self.network, rough), self.network, gradient_bytes)
        most = min(len(self.network.names), self.problem.micro_batches)
        if len(self.network.names) <= MOST_EXHAUSTIVE:
            found = [scorer.grouping(g) for g in every_grouping(len(self.network.names)) if 1 < len(g) <= most]
        else:
            worth_s = PROMISING * single_s
            found = [g for n in replica_counts(most) for g in groupings(scorer, self._regions, n, worth_s)]
            found = sorted((g for g in found if g.step_s <= worth_s), key=lambda g: g.step_s)[:MOST_CUT]
        cut = [layouts for grouping in found if (layouts := self._cut(grouping)) is not None]
        plans = [(_step_s(build_replicas(self.problem, x, planner="auto")), n) for n, x in enumerate(cut)]
        for step_s, number in sorted(plans)[:MOST_SHIFTED]:
            if step_s <= PROMISING * single_s:
                yield shifted(self.problem, cut[number], self.blocks.places)

    def _cut(self, grouping: Grouping) -> list[Layout] | None:
        """Each replica cut for itself; None where one does not fit."""
        layouts = [self._pipeline(frozenset(o), m) for o, m in zip(grouping.orders, grouping.shares, strict=True)]
        return [layout for layout in layouts if layout is not None] if None not in layouts else None

    def _pipeline(self, devices: frozenset[int], share: int) -> Layout | None:
        if (devices, share) not in self._pipelines:
            fleet = self.problem.fleet.subset(self.network.names[d] for d in devices)
            scale = {name: s for name, s in self.problem.speed_scale.items() if name in fleet.names}
            try:
                plan = chain(replace(self.problem, fleet=fleet, micro_batches=share, speed_scale=scale))
                layout = Layout(plan.devices, tuple(plan.boundaries()), share)
            except FleetTooSmall:
                layout = None
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


def _certified(problem: Problem, plan: Plan, bound_s: float) -> Plan:
    """The plan under this planner's name and with its certificate."""
    used = set(plan.devices)
    return msgspec.structs.replace(
        plan, planner="auto",
        certificate=step_certificate(bound_s, _step_s(plan), SCOPE),
        notes=tuple(
            note if name in used else f"{name} is left out: no plan that was found is faster with it"
            for name, note in zip(problem.fleet.names, plan.notes, strict=True)
        ),
    )  # fmt: skip
