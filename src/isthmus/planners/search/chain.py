"""Planner `chain`: one pipeline, and chains that several holders feed, each with data of its own.

There the first stage has a copy on every holder. In the closed form the holders are nearly one device (`as_one`): a
copy does its part of the micro-batches, so together they are as fast as the slowest is for its part, and so are their
links. The planners of one pipeline look for chains behind that device. Those are then priced as they are, with every
copy, its links and the sums, and improved by moves of cuts and devices. What that one device needs no chain undercuts,
so on small fleets every chain is tried in that order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from isthmus.cost import Problem, build_plan, preference
from isthmus.cost.blocks import Blocks, legal_places
from isthmus.cost.limits import broken_constraint
from isthmus.cost.network import network_of
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link
from isthmus.fleet.links import Links, Route
from isthmus.planners.baselines.even import even
from isthmus.planners.bounds import pipeline_bound
from isthmus.planners.observer import keep
from isthmus.planners.search.cuts import TOLERANCE
from isthmus.planners.search.descent import Stages, neighbours
from isthmus.planners.search.exhaustive import exhaustive_pipeline
from isthmus.planners.search.local_search import first_improvement
from isthmus.planners.search.one_pipeline import cheapest, fastest, with_bound
from isthmus.plans import Plan


def chain(problem: Problem) -> Plan:
    """The best choice, order and cuts of the devices: exact on small fleets, by local search over orders beyond.

    Raises FleetTooSmall with the device that is short, and by how much.
    """
    if problem.constraints.copied:
        return fed(problem)
    money = problem.constraints.objective == "cost" or problem.constraints.limited
    return cheapest(problem) if money else fastest(problem)


MOST_EXHAUSTIVE = 6
"""Devices behind the holders up to which every chain is tried."""
MOST_NEIGHBOURS = 400
"""Chains that are looked at near the best one."""

Chain = tuple[tuple[str, ...], tuple[int, ...]]
"""Devices, and the first operator of every stage but the first."""


FED = "any chain that {} feed with their own data: any others"


def fed(problem: Problem) -> Plan:
    """The best chain that all holders feed, with a lower bound on all such chains.

    Raises FleetTooSmall with the device that is short, and by how much; UserError where no first stage may have copies.
    """
    one = as_one(problem)
    network, blocks = network_of(one), Blocks(one)
    best = improved(problem, _best_start(problem, one))
    reached, bound = preference(problem, best)[0], pipeline_bound(one, network, blocks)
    if len(one.fleet.names) <= MOST_EXHAUSTIVE and reached > bound * (1 + TOLERANCE):
        proven = exhaustive_pipeline(one, network, blocks, reached, judged=problem)
        if proven is not None:
            best, bound = proven.plan or best, proven.bound
    return with_bound(problem, best, bound, FED.format(" and ".join(problem.constraints.feeders)))


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
    """What the planners of one pipeline make of it. Raises what the first of them did where none finds a plan."""
    searches = (cheapest if problem.constraints.objective == "cost" or problem.constraints.limited else fastest, even)
    plans: list[Plan] = []
    refused: list[UserError] = []
    for search in searches:
        try:
            found = search(one)
            plans.append(_built(problem, (tuple(s.device for s in found.stages), tuple(found.boundaries()))))
        except UserError as error:
            refused.append(error)
    for chain in _shortest(problem) if not plans else ():
        with contextlib.suppress(UserError):
            plans.append(_built(problem, chain))
    if not plans:
        raise refused[0]
    return min(plans, key=lambda plan: preference(problem, plan))


def _shortest(problem: Problem) -> Iterator[Chain]:
    """The holders and one device, the first stage as short as can be: where written buffers or memory bind."""
    feeders, places, last_start = problem.constraints.feeders, legal_places(problem), problem.last_start
    first = feeders[0]
    for name in (n for n in problem.fleet.names if n not in feeders):
        if last_start is None:
            yield from (((first, name), (place,)) for place in places[:1])
        else:
            yield from (((first, name, first), (places[0], end)) for end in places[1:] if end <= last_start)


def _built(problem: Problem, chain: Chain) -> Plan:
    order, boundaries = chain
    return keep(build_plan(problem, order, boundaries, planner="chain"))


def improved(problem: Problem, plan: Plan) -> Plan:
    """By moves of cuts, and of devices into the chain, out of it and past each other, as long as one helps."""
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
