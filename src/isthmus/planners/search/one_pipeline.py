"""Planner `chain`: one pipeline, the fastest, or the one whose step costs least money; also with several holders.

The search for the fastest begins with the closed form over the order and choice of devices and over the cuts:

    step = fill + (n - 1) * period + shared

Promising orders of the devices (`orders`) are cut (`cuts`), and moves improve the best few (`descent`); of a small
problem every pipeline is tried (`exhaustive`). With a scorer the search ends as that of `auto` does (`improvement`).
FusionLLM's OP-Fence and Sky Computing's allocation solve the same problem by heuristics.

On a given set of devices the price of an hour is fixed, so the fastest pipeline of a set is also its cheapest, but for
egress. What remains is to choose the set. Small fleets: all sets. Larger ones: the devices with the cheapest FLOPs, as
many as it takes and more, of all regions and of each. Then moves of devices and cuts improve the best, by its price.

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

from isthmus.cost import PlanLayout, Problem, build_plan, build_replicas, is_priced, layouts_of, preference
from isthmus.cost.blocks import Blocks, coarse, legal_places
from isthmus.cost.compression import packs_alike
from isthmus.cost.limits import broken_constraint
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.cost.price import SECONDS_PER_HOUR
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Device, Fleet, Link
from isthmus.fleet.links import Links, Route
from isthmus.planners.baselines.even import even
from isthmus.planners.observer import keep, looked_at
from isthmus.planners.search.cuts import cut_orders
from isthmus.planners.search.descent import Descent, Stages, neighbours, places
from isthmus.planners.search.exhaustive import exhaustive_pipeline
from isthmus.planners.search.greedy_fill import greedy_fill
from isthmus.planners.search.improvement import Score, by_score, by_steady_step, descended, judged, to_score
from isthmus.planners.search.local_search import TOLERANCE, first_improvement
from isthmus.planners.search.orders import promising_orders
from isthmus.planners.search.prune_fleet import pruned_fleet
from isthmus.planners.search.steady_descent import is_steady
from isthmus.planners.surrogates import over_surrogates
from isthmus.plans import Plan

ROUGH_BLOCKS, FINE_BLOCKS = 64, 300  # places at which orders are cut, and to which cuts then move
MOST_MOVED, MOST_LOOKED_AT = 6, 8_000  # pipelines that moves improve, and neighbours of each that are looked at


def chain(problem: Problem, score: Score | None = None) -> Plan:
    """The best choice, order and cuts of the devices: of all that there are on small fleets, by moves beyond.

    With a scorer the fastest is that by the steady step. Raises FleetTooSmall with the device that is short, and by how
    much.
    """
    if problem.constraints.copied:
        return fed(problem)
    money = problem.constraints.objective == "cost" or problem.constraints.limited
    if not money and score is not None and problem.schedule == "delayed":
        return _noted(problem, judged(problem, to_score([*_without_drain(problem), *pipelines(problem)]), score)[0])
    if money or score is None or not is_steady(problem):
        return cheapest(problem) if money else fastest(problem)
    near = pruned_fleet(problem, network_of(problem), Blocks(problem))
    network, plans = network_of(near), pipelines(near)
    plans = by_steady_step(near, network, [*plans, *descended(near, network, plans, "chain")], "chain")
    return _noted(problem, by_score(near, network, plans, "chain", score)[0])


def fastest(problem: Problem, *, thorough: bool = True) -> Plan:
    """The fastest pipeline by the formula, whatever the problem's objective. Raises FleetTooSmall as `pipelines`."""
    problem = problem.timed()
    return _noted(problem, pipelines(problem, thorough=thorough)[0])


def _without_drain(problem: Problem) -> Iterator[Plan]:
    """Yield the fast pipelines of `1f1b`: steps of `delayed` hinder each other less where a step alone is short, which
    its formula does not count."""
    with contextlib.suppress(FleetTooSmall):
        for plan in pipelines(replace(problem, schedule="1f1b")):
            free = [layout._replace(recompute=None) for layout in layouts_of(plan)]
            yield keep(build_replicas(problem, free, planner="chain"))


def pipelines(problem: Problem, *, thorough: bool = True) -> list[Plan]:
    """Fast pipelines, the best by the formula first.

    Otherwise than `thorough` moves improve one pipeline alone, and not every one of a small problem is tried. Raises
    FleetTooSmall with the device that is short, and by how much.
    """
    looked_at(0)
    network, blocks = network_of(problem), Blocks(problem)
    if not packs_alike(problem):
        plans = [over_surrogates(problem, partial(fastest, thorough=False)), *_baseline(problem)]
    else:
        near = pruned_fleet(problem, network, blocks)
        if near is not problem:
            return pipelines(near, thorough=thorough)
        plans = [*_cut(problem, network, blocks, MOST_MOVED if thorough else 1), *_baseline(problem)]
    if thorough:
        known = min((preference(problem, plan)[0] for plan in plans), default=float("inf"))
        better = exhaustive_pipeline(problem, network, blocks, known)
        plans += [] if better is None else [better]
    if not plans:  # raises unless a placement was missed
        fallback = greedy_fill(problem, network, blocks)
        order = [problem.fleet.names[d] for d in fallback.devices]
        plans.append(keep(build_plan(problem, order, blocks.boundaries(fallback.cut), planner="chain")))
        if packs_alike(problem):
            plans += _moved(problem, network, layouts_of(plans[0]), plans[0].predicted.step_s)
    return sorted(plans, key=lambda plan: preference(problem, plan))


def _cut(problem: Problem, network: FleetNetwork, blocks: Blocks, moved: int) -> Iterator[Plan]:
    """Yield the best pipeline of promising orders of the devices, and what moves make of the best few."""
    rough = coarse(blocks, ROUGH_BLOCKS)
    orders = promising_orders(problem, network, rough)
    for k, made in enumerate(cut_orders(problem, network, rough, orders)[:moved]):
        boundaries = rough.boundaries(made.stages.ends[1:-1])
        if k == 0:
            yield from _built(problem, made.stages.order, boundaries)
        order = tuple(network.names[d] for d in made.stages.order)
        start = PlanLayout(order, tuple(boundaries), problem.micro_batches)
        yield from _moved(problem, network, [start], made.step_s)


def _moved(problem: Problem, network: FleetNetwork, start: Sequence[PlanLayout], known: float) -> Iterator[Plan]:
    """Yield the pipeline after moves, if these find a better one than `known`, in seconds or money."""
    fine = places(problem, start, FINE_BLOCKS)
    better = Descent(problem, network, fine, MOST_LOOKED_AT).run(start, known)
    for layout in better[1] if better is not None else ():
        yield from _built(problem, [network.names.index(name) for name in layout.order], layout.boundaries)


def _built(problem: Problem, devices: Sequence[int], boundaries: Sequence[int]) -> Iterator[Plan]:
    order = [problem.fleet.names[d] for d in devices]
    with contextlib.suppress(FleetTooSmall):  # two stages may each fit the device that they share
        yield keep(build_plan(problem, order, boundaries, planner="chain"))


def _baseline(problem: Problem) -> Iterator[Plan]:
    with contextlib.suppress(FleetTooSmall):
        yield keep(even(problem))


MOST_SETS_OF = 5  # devices of which every set is tried
MOST_DROPPED = 40  # sets tried that are a device short of the best
UNPRICED = "objective cost: nothing in the fleet has a price, so every plan costs 0 and the fastest is as good as any"


def cheapest(problem: Problem) -> Plan:
    """The cheapest pipeline; of equally cheap ones the fastest. On a fleet without prices the fastest, and it says so.

    Raises FleetTooSmall with the device that is short, and by how much.
    """
    if not is_priced(problem.fleet) and problem.constraints.max_step_s is None:
        return unpriced(problem, fastest(problem))
    network, blocks = network_of(problem), Blocks(problem)
    plans = _of_sets(problem, blocks) or [_rebuilt(problem, fastest(problem))]  # raises where nothing fits
    near = pruned_fleet(problem, network, blocks)
    if near is not problem:
        plans.append(_rebuilt(problem, cheapest(near)))
    elif len(network.names) > MOST_SETS_OF:
        plans += _with_fewer(problem, min(plans, key=lambda plan: preference(problem, plan)))
    if near is problem and packs_alike(problem) and not problem.constraints.limited:
        for plan in sorted(plans, key=lambda plan: preference(problem, plan))[:MOST_MOVED]:
            plans += _moved(problem, network, layouts_of(plan), preference(problem, plan)[0])
    known = min(preference(problem, plan)[0] for plan in plans)
    better = exhaustive_pipeline(problem, network, blocks, known * (1 + 1e-9))
    plans += [] if better is None else [better]
    return _noted(problem, min(plans, key=lambda plan: preference(problem, plan)))


def unpriced(problem: Problem, plan: Plan) -> Plan:
    """The plan for a fleet in which nothing costs anything."""
    return msgspec.structs.replace(plan, constraints=problem.constraints, notes=(UNPRICED, *plan.notes))


def device_sets(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Sets of devices that may be cheap together, each with a data holder where the data are not everywhere."""
    names = problem.fleet.names
    if len(names) <= MOST_SETS_OF:
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


def _of_sets(problem: Problem, blocks: Blocks) -> list[Plan]:
    """The fastest pipelines of the sets that may be the cheapest, by a lower bound on their price.

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
    found: list[Plan] = []
    for bound, names in sorted(bounds, key=lambda pair: pair[0]):
        if found and bound > min(preference(problem, plan)[0] for plan in found):
            break
        found += _of_set(problem, names)
    return found


def _of_set(problem: Problem, names: Sequence[str]) -> Iterator[Plan]:
    """Yield the fastest pipeline of these devices, as a plan of the whole fleet, if any fits."""
    with contextlib.suppress(FleetTooSmall):
        yield _rebuilt(problem, fastest(problem.on(problem.fleet.subset(names)), thorough=False))


def _with_fewer(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield ever cheaper plans: devices are taken from the set, the dearest first, as long as that saves money."""
    tried, holders = 0, set(problem.constraints.data_holders)
    by_price = sorted(plan.used, key=lambda name: -problem.fleet.device(name).price_per_hour)
    while by_price and tried < MOST_DROPPED:
        left = tuple(other for other in plan.used if other != by_price[0])
        tried, by_price = tried + 1, by_price[1:]
        for other in _of_set(problem, left) if left and (not holders or holders & set(left)) else ():
            if preference(problem, other) < preference(problem, plan):
                plan = other
                by_price = sorted(plan.used, key=lambda name: -problem.fleet.device(name).price_per_hour)
                yield plan


def _least_s(network: FleetNetwork, blocks: Blocks, micro_batches: int) -> float:
    """Return what the formula of no pipeline undercuts: all devices share the work, but for the largest block."""
    work, fastest_flops = float(blocks.work[-1]), float(network.speed.max())
    largest = float(np.diff(blocks.work).max(initial=0.0))
    return work / fastest_flops + (micro_batches - 1) * max(work / float(network.speed.sum()), largest / fastest_flops)


def _rebuilt(problem: Problem, plan: Plan) -> Plan:
    """A plan of a part of the fleet, or of a problem like this one, as one of the problem."""
    return build_plan(problem, [stage.device for stage in plan.stages], plan.boundaries(), planner="chain")


def _noted(problem: Problem, plan: Plan) -> Plan:
    """The same layout as a plan of this problem, with the reason why devices are left out."""
    better = "cheaper" if problem.constraints.objective == "cost" else "faster"
    idle = [name for name in problem.fleet.names if name not in plan.devices]
    notes = dict.fromkeys(idle, f"no plan that was found is {better} with it")
    return build_replicas(problem, layouts_of(plan), planner="chain", notes=notes)


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
