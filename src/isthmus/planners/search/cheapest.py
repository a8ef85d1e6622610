"""The pipeline whose step costs least money: its devices by the hour, and what leaves priced sites.

On a given set of devices the price of an hour is fixed, so the fastest pipeline of a set is also its cheapest, but for
egress. What remains is to choose the set. Small fleets: all sets, and then every pipeline is tried as far as a budget
goes. Larger ones: the devices with the cheapest FLOPs, as many as it takes and more, of all regions and of each; then
the best set loses devices as long as that saves money.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import msgspec

from isthmus.cost import Problem, build_plan, is_priced, preference
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.cost.price import SECONDS_PER_HOUR
from isthmus.errors import FleetTooSmall
from isthmus.planners.bounds import pooled_bound_s, step_certificate
from isthmus.planners.observer import looked_at
from isthmus.planners.price_bound import cheapest_pipeline_bound, price_certificate
from isthmus.planners.search.exhaustive_pipelines import exhaustive_pipeline
from isthmus.planners.search.fastest import fastest
from isthmus.planners.search.threshold_search import TOLERANCE
from isthmus.plans import Plan

MOST_EXHAUSTIVE = 5
"""Devices up to which every set of them is tried."""
MOST_DROPPED = 40
"""Sets tried that are a device short of the best."""
QUESTION = "the price of a step of any plan of one replica: any devices in any order, any cuts, by the closed form"
UNPRICED = "objective cost: nothing in the fleet has a price, so every plan costs 0 and the fastest is as good as any"


def cheapest(problem: Problem) -> Plan:
    """The cheapest pipeline; of equally cheap ones the fastest. On a fleet without prices the fastest, and it says so.

    Raises FleetTooSmall with the device that is short, and by how much.
    """
    if not is_priced(problem.fleet) and problem.constraints.max_step_s is None:
        return unpriced(problem, fastest(problem))
    network, blocks = network_of(problem), Blocks(problem)
    best = _best_of(problem, blocks)
    if best is None:
        best = _rebuilt(problem, fastest(problem))  # raises where nothing fits
    if len(problem.fleet.names) > MOST_EXHAUSTIVE:
        best = _with_fewer(problem, best)
    price, bound = preference(problem, best)[0], _bound(problem, network, blocks)
    # Where the simple bound is reached nothing is left to try.
    small = len(problem.fleet.names) <= MOST_EXHAUSTIVE and bound < price * (1 - TOLERANCE)
    proven = exhaustive_pipeline(problem, network, blocks, price * (1 + 1e-9)) if small else None
    if proven is not None:
        if proven.plan is not None:
            best = min(best, proven.plan, key=lambda plan: preference(problem, plan))
        return _certified(problem, best, proven.bound)
    return _certified(problem, best, bound)


def _bound(problem: Problem, network: FleetNetwork, blocks: Blocks) -> float:
    """Of what is minimised; a limit on the other can only add."""
    if problem.constraints.objective == "time":
        return pooled_bound_s(network, blocks, problem.micro_batches)
    return cheapest_pipeline_bound(problem, network, blocks)


def unpriced(problem: Problem, plan: Plan) -> Plan:
    """The plan for a fleet in which nothing costs anything: its certificate is one of time."""
    return msgspec.structs.replace(plan, constraints=problem.constraints, notes=(UNPRICED, *plan.notes))


def device_sets(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Sets of devices that may be cheap together, each with a data holder where the data are not everywhere."""
    names = problem.fleet.names
    if len(names) <= MOST_EXHAUSTIVE:
        sets: Iterable[tuple[str, ...]] = (
            chosen for size in range(1, len(names) + 1) for chosen in itertools.combinations(names, size)
        )
    else:
        sets = _cheap_first(problem)
    holders = set(problem.constraints.data_holders)
    return (chosen for chosen in dict.fromkeys(sets) if not holders or holders & set(chosen))


def _cheap_first(problem: Problem) -> Iterator[tuple[str, ...]]:
    """The first few by price per FLOP, of the whole fleet and of each region; then everything."""
    fleet = problem.fleet
    by_price = sorted(fleet.devices, key=lambda d: (d.price_per_flop, -d.sustained_flops_per_s))
    ranked = [d.name for d in by_price]
    holder = [name for name in ranked if name in problem.constraints.data_holders][:1]
    for region in (None, *fleet.regions):
        members = [d.name for d in by_price if region in (None, d.region) and d.name not in holder]
        size = 1
        while size <= len(members):
            yield (*holder, *members[:size])
            size = size + 1 if size < 4 else size * 3 // 2
    yield fleet.names


def _best_of(problem: Problem, blocks: Blocks) -> Plan | None:
    """The best of the fastest pipelines of the sets, of which those come first that may be the cheapest.

    A plan that uses all of a set pays it for no less than a lower bound on its time; one that uses a part is in
    another set.
    """
    bounds: list[tuple[float, tuple[str, ...]]] = []
    for names in device_sets(problem):
        looked_at(0)
        part = problem.timed().on(problem.fleet.subset(names))
        hour = sum(device.price_per_hour for device in part.fleet.devices)
        second = hour / SECONDS_PER_HOUR if problem.constraints.objective == "cost" else 1.0
        bounds.append((second * pooled_bound_s(network_of(part), blocks, problem.micro_batches), names))
    best: Plan | None = None
    for bound, names in sorted(bounds, key=lambda pair: pair[0]):
        if best is not None and bound > preference(problem, best)[0]:
            break
        tried = [*_of_sets(problem, [names]), *([best] if best is not None else [])]
        best = min(tried, key=lambda plan: preference(problem, plan), default=None)
    return best


def _of_sets(problem: Problem, sets: Iterable[tuple[str, ...]]) -> Iterator[Plan]:
    for names in sets:
        with contextlib.suppress(FleetTooSmall):
            yield _rebuilt(problem, fastest(problem.timed().on(problem.fleet.subset(names))))


def _rebuilt(problem: Problem, plan: Plan) -> Plan:
    """A plan of a part of the fleet as one of all of it."""
    order = [stage.device for stage in plan.stages]
    return build_plan(problem, order, plan.boundaries(), planner="chain")


def _with_fewer(problem: Problem, plan: Plan) -> Plan:
    """Devices are taken from the set, the dearest first, as long as a step becomes cheaper."""
    tried, improved = 0, True
    while improved:
        improved = False
        by_price = sorted(plan.used, key=lambda name: -problem.fleet.device(name).price_per_hour)
        for name in by_price:
            left = tuple(other for other in plan.used if other != name)
            holders = problem.constraints.data_holders
            if not left or (holders and not set(holders) & set(left)) or tried >= MOST_DROPPED:
                continue
            tried += 1
            other = next(_of_sets(problem, [left]), None)
            if other is not None and preference(problem, other) < preference(problem, plan):
                plan, improved = other, True
                break
    return plan


def _certified(problem: Problem, plan: Plan, bound: float) -> Plan:
    certify, question = price_certificate, QUESTION
    if problem.constraints.objective == "time":
        certify, question = step_certificate, QUESTION.replace("price", "time")
    certificate = certify(bound, preference(problem, plan)[0], question)
    proven = certificate is not None and not certificate.gap
    reason = "no plan is cheaper with it" if proven else "no plan that was found is cheaper with it"
    return build_plan(
        problem,
        [stage.device for stage in plan.stages],
        plan.boundaries(),
        planner="chain",
        certificate=certificate,
        notes={name: reason for name in problem.fleet.names if name not in plan.devices},
    )
