"""Planner `chain`: one pipeline, the fastest, or the one whose step costs least money; also with several holders.

The fastest minimises the closed form over the order and choice of devices and over the cuts:

    step = fill + (n - 1) * period + shared

Up to six devices it is exact; beyond, orders come from local search, and cuts stay exact. FusionLLM's OP-Fence and Sky
Computing's allocation solve the same problem by heuristics.

On a given set of devices the price of an hour is fixed, so the fastest pipeline of a set is also its cheapest, but for
egress:

    price of a set >= rate of its devices * bound on its step

What remains is to choose the set. Small fleets: all sets, in the order of that bound, and then every pipeline is tried
as far as a budget goes. Larger ones: the devices with the cheapest FLOPs, as many as it takes and more, of all regions
and of each; then the best set loses devices as long as that saves money.

Several holders may feed one chain, each with data of its own: the first stage has a copy on every holder. In the closed
form the holders are nearly one device (`as_one`): a copy does its part of the micro-batches, so together they are as
fast as the slowest is for its part, and so are their links. Chains are looked for behind that device, priced as they
are, with every copy, its links and the sums, and improved by moves of cuts and devices. What that one device needs no
chain undercuts, so on small fleets every chain is tried in that order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from isthmus.cost import Problem, build_plan, is_priced, preference
from isthmus.cost.blocks import Blocks, legal_places
from isthmus.cost.compression import packs_alike
from isthmus.cost.cut_table import stage_bytes
from isthmus.cost.limits import broken_constraint
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.cost.price import SECONDS_PER_HOUR
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Device, Fleet, Link
from isthmus.fleet.links import Links, Route
from isthmus.planners.baselines.even import even
from isthmus.planners.observer import keep, looked_at
from isthmus.planners.search.cuts import TOLERANCE
from isthmus.planners.search.descent import Stages, neighbours
from isthmus.planners.search.exhaustive import exhaustive_pipeline
from isthmus.planners.search.greedy_fill import greedy_fill
from isthmus.planners.search.local_search import first_improvement
from isthmus.planners.search.orders import FoundOrder, OrderSearch
from isthmus.planners.search.prune_fleet import pruned_fleet
from isthmus.planners.surrogates import over_surrogates
from isthmus.plans import Plan


def chain(problem: Problem) -> Plan:
    """The best choice, order and cuts of the devices: exact on small fleets, by local search over orders beyond.

    Raises FleetTooSmall with the device that is short, and by how much.
    """
    if problem.constraints.copied:
        return fed(problem)
    money = problem.constraints.objective == "cost" or problem.constraints.limited
    return cheapest(problem) if money else fastest(problem)


def fastest(problem: Problem, *, settle: bool = True) -> Plan:
    """The fastest pipeline, whatever the problem's objective.

    Without `settle` it does not try every pipeline where memory throttles them. Raises FleetTooSmall
    with the device that is short, and by how much.
    """
    looked_at(0)
    problem = problem.timed()
    network, blocks = network_of(problem), Blocks(problem)
    if not packs_alike(problem):
        return _packed(problem, network, blocks, settle)
    near = pruned_fleet(problem, network, blocks)
    if near is not problem:
        return _noted(problem, fastest(near, settle=False))
    classic = OrderSearch(problem, network, blocks)
    best = classic.run() if classic.exhaustive or problem.schedule == "gpipe" else None
    plans = list(_plans(problem, best))
    closed_form_s = best.step_s if best else 0.0
    # Where memory throttles the pipeline, the closed form is not the whole story: search again with it in mind, and
    # for stages that recompute.
    throttled = problem.schedule != "gpipe" and not any(
        p.predicted.step_s <= closed_form_s * (1 + TOLERANCE) for p in plans
    )
    if throttled:
        plans += _plans(problem, OrderSearch(problem, network, blocks, throttled=True).run())
    if problem.recompute and (throttled or not plans):
        plans += _plans(problem, OrderSearch(problem, network, blocks.recomputing()).run())
    plans += _baseline(problem)
    tight = throttled or _memory_binds(problem, network, blocks)
    if classic.exhaustive and ((tight and settle) or problem.constraints.labels_stay):
        known_s = min((p.predicted.step_s for p in plans), default=float("inf"))
        better = exhaustive_pipeline(problem, network, blocks, known_s)
        plans += [] if better is None else [better]
    if not plans:  # raises unless a placement was missed
        fallback = greedy_fill(problem, network, blocks)
        plans += _plans(problem, FoundOrder(fallback.devices, tuple(blocks.boundaries(fallback.cut)), 0.0))
    return _noted(problem, min(plans, key=lambda p: p.predicted.step_s))


def _packed(problem: Problem, network: FleetNetwork, blocks: Blocks, settle: bool) -> Plan:
    """Where what a message takes depends on the plan."""
    best = over_surrogates(problem, partial(fastest, settle=False))
    plans = [best, *_baseline(problem)]
    best = min(plans, key=lambda p: preference(problem, p))
    if settle and OrderSearch(problem, network, blocks).exhaustive:
        best = exhaustive_pipeline(problem, network, blocks, preference(problem, best)[0]) or best
    return _noted(problem, best)


def _memory_binds(problem: Problem, network: FleetNetwork, blocks: Blocks) -> bool:
    """Return whether some device could not hold the whole model with the micro-batches of the classic schedule."""
    most = problem.micro_batches
    held = most if problem.schedule == "gpipe" else min(most, len(network.names) + problem.constraints.labels_stay)
    return float(stage_bytes(blocks, 0, [blocks.count], held)[0]) > float(network.memory.min())


def _plans(problem: Problem, found: FoundOrder | None) -> Iterator[Plan]:
    if found is not None:
        order = [problem.fleet.names[d] for d in found.devices]
        with contextlib.suppress(FleetTooSmall):  # two stages may each fit the device that they share
            yield keep(build_plan(problem, order, found.boundaries, planner="chain"))


def _baseline(problem: Problem) -> Iterator[Plan]:
    with contextlib.suppress(FleetTooSmall):
        yield keep(even(problem))


MOST_EXHAUSTIVE = 5  # devices up to which every set of them is tried
MOST_DROPPED = 40  # sets tried that are a device short of the best
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
    else:
        other = exhaustive_pipeline(problem, network, blocks, preference(problem, best)[0] * (1 + 1e-9)) or best
        best = min(best, other, key=lambda plan: preference(problem, plan))
    return _noted(problem, best)


def unpriced(problem: Problem, plan: Plan) -> Plan:
    """The plan for a fleet in which nothing costs anything."""
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
        bounds.append((second * _least_s(network_of(part), blocks, problem.micro_batches), names))
    best: Plan | None = None
    # price of a set >= rate of its devices * bound on its step
    for bound, names in sorted(bounds, key=lambda pair: pair[0]):
        if best is not None and bound > preference(problem, best)[0]:
            break
        found = _of_set(problem, names)
        if found is not None and (best is None or preference(problem, found) <= preference(problem, best)):
            best = found
    return best


def _least_s(network: FleetNetwork, blocks: Blocks, micro_batches: int) -> float:
    """Return what the formula of no pipeline undercuts: all devices share the work, but for the largest block."""
    work, fastest_flops = float(blocks.work[-1]), float(network.speed.max())
    largest = float(np.diff(blocks.work).max(initial=0.0))
    return work / fastest_flops + (micro_batches - 1) * max(work / float(network.speed.sum()), largest / fastest_flops)


def _of_set(problem: Problem, names: Sequence[str]) -> Plan | None:
    """The fastest pipeline of these devices, as a plan of the whole fleet; None where nothing fits them."""
    try:
        return _rebuilt(problem, fastest(problem.timed().on(problem.fleet.subset(names))))
    except FleetTooSmall:
        return None


def _rebuilt(problem: Problem, plan: Plan) -> Plan:
    """A plan of a part of the fleet, or of a problem like this one, as one of the problem."""
    return build_plan(problem, [stage.device for stage in plan.stages], plan.boundaries(), planner="chain")


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
            other = _of_set(problem, left)
            if other is not None and preference(problem, other) < preference(problem, plan):
                plan, improved = other, True
                break
    return plan


def _noted(problem: Problem, plan: Plan) -> Plan:
    """The same layout as a plan of this problem, with the reason why devices are left out."""
    better = "cheaper" if problem.constraints.objective == "cost" else "faster"
    idle = [name for name in problem.fleet.names if name not in plan.devices]
    notes = dict.fromkeys(idle, f"no plan that was found is {better} with it")
    return build_plan(problem, [stage.device for stage in plan.stages], plan.boundaries(), planner="chain", notes=notes)


MOST_BEHIND = 6  # devices behind the holders up to which every chain is tried
MOST_NEIGHBOURS = 400  # chains that are looked at near the best one


def fed(problem: Problem) -> Plan:
    """The best chain that all holders feed.

    Raises FleetTooSmall with the device that is short, and by how much; UserError where no first stage may have copies.
    """
    one = as_one(problem)
    network, blocks = network_of(one), Blocks(one)
    best = improved_by_moves(problem, _best_start(problem, one))
    if len(one.fleet.names) <= MOST_BEHIND:
        best = exhaustive_pipeline(one, network, blocks, preference(problem, best)[0], judged=problem) or best
    return _noted(problem, best)


def as_one(problem: Problem) -> Problem:
    """The same with one device in place of all holders, under the first one's name, that is as fast as they are
    together. What it takes no chain that they feed undercuts: a link of it has the least latency of theirs, and nothing
    that leaves it costs money. That is so of what it computes and sends, and of what fits into the tightest holder's
    memory. How long that memory holds up a stage is not: of a copy only its part of a round trip counts."""
    fleet, constraints = problem.fleet, problem.constraints
    feeders, shares = constraints.feeders, constraints.shares
    first, others = feeders[0], [name for name in fleet.names if name not in feeders]
    speed = min(fleet.device(name).sustained_flops_per_s / share for name, share in zip(feeders, shares, strict=True))
    memory = fleet.device(problem.tightest(first)).memory_bytes
    price = sum(fleet.device(name).price_per_hour for name in feeders)
    device = Device(name=first, region=f"at {first}", flops_per_s=speed, memory_bytes=memory, price_per_hour=price)

    def link(pairs: list[tuple[str, str]]) -> Link:
        links = [fleet.link(*pair) for pair in pairs]
        bandwidth = min(x.bandwidth_bytes_per_s / share for x, share in zip(links, shares, strict=True))
        return Link(latency_s=min(x.latency_s for x in links), bandwidth_bytes_per_s=bandwidth)

    routes = [Route(a, b, fleet.link(a, b)) for a in others for b in others if a != b]
    routes += [Route(first, b, link([(name, b) for name in feeders])) for b in others]
    routes += [Route(a, first, link([(a, name) for name in feeders])) for a in others]
    kept = [msgspec.structs.replace(fleet.device(name), region=f"at {name}") for name in others]
    together = Fleet(name=fleet.name, devices=(device, *kept), links=Links(devices=tuple(routes)))
    return replace(
        problem, fleet=together, constraints=msgspec.structs.replace(constraints, data_holders=(first,), own_samples=())
    )


def _best_start(problem: Problem, one: Problem) -> Plan:
    """Return the best plan of the planners of one pipeline. Raises the first one's error where none finds a plan."""
    plans: list[Plan] = []
    refused: list[UserError] = []
    for search in (chain, even):
        try:
            plans.append(keep(_rebuilt(problem, search(one))))
        except UserError as error:
            refused.append(error)
    for order, boundaries in _shortest(problem) if not plans else ():
        with contextlib.suppress(UserError):
            plans.append(keep(build_plan(problem, order, boundaries, planner="chain")))
    if not plans:
        raise refused[0]
    return min(plans, key=lambda plan: preference(problem, plan))


def _shortest(problem: Problem) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The holders and one device, the first stage as short as can be: where written buffers or memory bind."""
    feeders, places, last_start = problem.constraints.feeders, legal_places(problem), problem.last_start
    first = feeders[0]
    for name in (n for n in problem.fleet.names if n not in feeders):
        if last_start is None:
            yield from (((first, name), (place,)) for place in places[:1])
        else:
            yield from (((first, name, first), (places[0], end)) for end in places[1:] if end <= last_start)


def improved_by_moves(problem: Problem, plan: Plan) -> Plan:
    """Move cuts, and devices into the chain, out of it and past each other, as long as a move helps."""
    blocks, number = Blocks(problem), {name: d for d, name in enumerate(problem.fleet.names)}

    def near(now: Plan) -> Iterator[Plan]:
        ends = (0, *map(blocks.block_of, now.boundaries()), blocks.count)
        stages = Stages(tuple(number[stage.device] for stage in now.stages), ends)
        idle = [d for name, d in number.items() if d not in stages.order and name not in problem.constraints.feeders]
        for other in itertools.chain.from_iterable(neighbours(stages, idle)):
            order = [problem.fleet.names[d] for d in other.order]
            boundaries = blocks.boundaries(other.ends[1:-1])
            if broken_constraint(problem, order, boundaries) is None:
                with contextlib.suppress(UserError):  # it does not fit, or neighbours are on one device
                    yield keep(build_plan(problem, order, boundaries, planner=plan.planner))

    return first_improvement(
        plan, near, lambda made: preference(problem, made)[0], most=MOST_NEIGHBOURS, tolerance=TOLERANCE
    )
