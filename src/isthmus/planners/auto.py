"""How many replicas, which devices in which, where each is cut, and who takes how much of the batch.

Groupings that score well (`groups`) are cut exactly, replica by replica, by `chain`; then cuts are moved together,
because replicas that are cut alike average with fewer partners. What is found is judged by the closed form of `cost`,
and the best few by the scorer that the caller injects, if any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import combinations

import msgspec

from isthmus.cost import Layout, Problem, build_replicas, is_priced, preference
from isthmus.errors import FleetTooSmall, UserError
from isthmus.plan import Plan
from isthmus.planners.allocation.on_fleet import certified, equal_compute, sky_heuristic
from isthmus.planners.blocks import Blocks, coarse
from isthmus.planners.bounds import step_certificate
from isthmus.planners.chain import chain
from isthmus.planners.cheapest import unpriced
from isthmus.planners.fastest import fastest
from isthmus.planners.groups import Grouping, GroupScorer, every_grouping, groupings
from isthmus.planners.layout_search import shifted
from isthmus.planners.network import network_of
from isthmus.planners.op_fence import op_fence
from isthmus.planners.orders import scorer_of
from isthmus.planners.pins import pins_of
from isthmus.planners.placement.on_fleet import islands, random
from isthmus.planners.price_bound import cheapest_replicas_bound, price_certificate
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
PRICED_SCOPE = (
    "price of a step: any number of replicas, any devices, orders, cuts and shares of the batch; the gap is what is "
    "not proven"
)

Score = Callable[[Plan], float]
"""Seconds per step of a plan, from whoever knows better than the closed form: the simulator."""


def auto(problem: Problem, score: Score | None = None) -> Plan:
    """The fastest plan found over any number of replicas, or the cheapest, with a lower bound on all plans.

    Raises FleetTooSmall with the device that is short, and by how much: a model that no single pipeline holds, no
    replicas hold either.
    """
    if problem.terms.objective == "cost" and not is_priced(problem.fleet):
        return unpriced(problem, auto(problem.timed(), score))
    search, single = _Search(problem), chain(problem)
    found = [single, *search.replicated(single), *_others(problem)]
    plans = sorted(found, key=lambda plan: preference(problem, plan))
    if score is not None:
        plans = sorted(plans[:MOST_SCORED], key=score)
    proven = single.certificate.lower_bound if single.certificate else 0.0
    return _certified(problem, plans[0], min(proven, search.replicas_bound()))


def _others(problem: Problem) -> Iterator[Plan]:
    """What the other planners make of it, as far as they are quick: they put any part of the model anywhere."""
    if problem.terms.data_holders:
        return
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
        self.pins = pins_of(problem, self.network)
        self._regions = [problem.fleet.regions.index(device.region) for device in problem.fleet.devices]
        self._pipelines: dict[tuple[frozenset[int], int], Layout | None] = {}
        self._gradient_bytes = float(sum(variable.gradient_bytes for variable in self.blocks.variables))

    @property
    def most_replicas(self) -> int:
        """Each has a micro-batch at least, and a device that has the data."""
        return min(len(self.pins.holders), self.problem.micro_batches)

    def replicas_bound(self) -> float:
        """Seconds or money, by the problem's objective."""
        if self.most_replicas < 2:
            return float("inf")
        if self.problem.terms.objective == "cost":
            return cheapest_replicas_bound(self.problem, self.network, self.blocks, self._gradient_bytes)
        return replicas_bound_s(
            self.network, self.blocks, self.problem.micro_batches, self._gradient_bytes, self.problem.sync.period
        )

    def replicated(self, single: Plan) -> Iterator[Plan]:
        """Plans of two replicas and more, each the best of its grouping; `single` is the best pipeline."""
        if self.most_replicas < 2:
            return
        if self.problem.terms.objective == "cost":
            single_s, worth = _step_s(fastest(self.problem)), PROMISING * preference(self.problem, single)[0]
        else:
            single_s, worth = _step_s(single), PROMISING * _step_s(single)
        cut = [layouts for grouping in self._groupings(single_s) if (layouts := self._cut(grouping)) is not None]
        plans = [(self._judged(x), n) for n, x in enumerate(cut)]
        for judged, number in sorted(plans)[:MOST_SHIFTED]:
            if judged <= worth:
                yield shifted(self.problem, cut[number], self.blocks.places)

    def _judged(self, layouts: list[Layout]) -> float:
        return preference(self.problem, build_replicas(self.problem, layouts, planner="auto"))[0]

    def _groupings(self, single_s: float) -> list[Grouping]:
        rough = coarse(self.blocks, ROUGH_BLOCKS)
        gradient_bytes = self._gradient_bytes / self.problem.sync.period
        scorer = GroupScorer(scorer_of(self.problem, self.network, rough), self.network, gradient_bytes)
        devices, most = len(self.network.names), self.most_replicas
        if devices <= MOST_EXHAUSTIVE:
            # Time leaves devices out where a group is cut; for money it matters already which are in a group.
            least = 2 if self.problem.terms.objective == "cost" else devices
            sets = [chosen for size in range(least, devices + 1) for chosen in combinations(range(devices), size)]
            every = ((chosen, g) for chosen in sets for g in every_grouping(len(chosen)) if 1 < len(g) <= most)
            return [scorer.grouping([tuple(chosen[k] for k in order) for order in g]) for chosen, g in every]
        worth_s = PROMISING * single_s
        found = [g for n in replica_counts(most) for g in groupings(scorer, self._regions, n, worth_s)]
        found = [scorer.grouping(self.pins.dealt(g.orders)) for g in found]
        return sorted((g for g in found if g.step_s <= worth_s), key=lambda g: g.step_s)[:MOST_CUT]

    def _cut(self, grouping: Grouping) -> list[Layout] | None:
        """Each replica cut for itself; None where one does not fit."""
        layouts = [self._pipeline(frozenset(o), m) for o, m in zip(grouping.orders, grouping.shares, strict=True)]
        return [layout for layout in layouts if layout is not None] if None not in layouts else None

    def _pipeline(self, devices: frozenset[int], share: int) -> Layout | None:
        if (devices, share) not in self._pipelines:
            layout = None
            if devices & set(self.pins.holders):
                fleet = self.problem.fleet.subset(self.network.names[d] for d in devices)
                with contextlib.suppress(FleetTooSmall):
                    plan = fastest(self.problem.on(fleet, share))
                    layout = Layout(tuple(stage.device for stage in plan.stages), tuple(plan.boundaries()), share)
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


def _certified(problem: Problem, plan: Plan, bound: float) -> Plan:
    """The plan under this planner's name and with its certificate."""
    used, priced = set(plan.devices), problem.terms.objective == "cost"
    found = preference(problem, plan)[0]
    better = "cheaper" if priced else "faster"
    return msgspec.structs.replace(
        plan, planner="auto",
        certificate=price_certificate(bound, found, PRICED_SCOPE) if priced else step_certificate(bound, found, SCOPE),
        notes=tuple(
            note if name in used else f"{name} is left out: no plan that was found is {better} with it"
            for name, note in zip(problem.fleet.names, plan.notes, strict=True)
        ),
    )  # fmt: skip
