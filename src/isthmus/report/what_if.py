"""The effect of one change of the fleet on a plan that stays as it is: computed with the cost model, not guessed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from isthmus.cost import Placement, PlanLayout, Problem, build_replicas, in_flight_limits, layouts_of, place
from isthmus.cost.placement import rooms
from isthmus.cost.steptime import pipeline
from isthmus.cost.sync import sync_s
from isthmus.errors import UserError
from isthmus.fleet.edits import with_links, with_memory_scaled, with_speed, with_uplink
from isthmus.graph import cuts
from isthmus.plans import Plan

MOST_SWAPS = 8  # stages, the busiest first, in whose place a device that is left out is tried

ABREAST = 0.9  # share of the period from which on a device counts as being as slow as the slowest


class Improvement(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that could be better, and the step that the same plan would then take."""

    what: str
    step_s: float
    saved: float  # share of the step, 0 to 1; below 0 where it would take longer


def placements(problem: Problem, plan: Plan) -> list[Placement]:
    """Each replica of the plan with its durations. UserError where the plan is not one for the problem."""
    problem = problem.under(plan.replicas[0].schedule)
    return [
        place(replace(problem, micro_batches=x.micro_batches), x.order, x.boundaries, x.recompute or ())
        for x in layouts_of(plan)
    ]


def improvements(problem: Problem, plan: Plan) -> list[Improvement]:
    """Each device, link and uplink that the plan uses made twice as good, one at a time; the best first."""
    problem = problem.under(plan.replicas[0].schedule)
    placed = placements(problem, plan)
    now_s = _step_s(problem, plan, placed)
    better = [*_better(problem, plan), *_abreast(problem, plan, placed)]
    found = [_change(what, now_s, _step_s(changed, plan, placed)) for what, changed in better]
    return sorted(found, key=lambda change: change.step_s)


def with_device(problem: Problem, plan: Plan, name: str) -> Improvement | None:
    """The best of the plans tried that use a device which this one leaves out: in place of another, or sharing the
    slowest stage with its device. None where it fits nowhere."""
    problem = problem.under(plan.replicas[0].schedule)
    found: list[Improvement] = []
    for what, layouts in _alternatives(problem, plan, name):
        try:
            tried = build_replicas(problem, layouts, planner="tried").predicted.step_s
        except UserError:  # it does not fit, or breaks the plan's terms
            continue
        found.append(_change(what, plan.predicted.step_s, tried))
    return min(found, key=lambda change: change.step_s, default=None)


def _change(what: str, now_s: float, then_s: float) -> Improvement:
    return Improvement(what=what, step_s=then_s, saved=1 - then_s / now_s if now_s else 0.0)


def _step_s(problem: Problem, plan: Plan, placed: Sequence[Placement]) -> float:
    """The step of graphs cut once, under a problem that differs in its fleet or speeds only."""
    slowest_s = 0.0
    for p in placed:
        share = replace(problem, micro_batches=p.problem.micro_batches)
        times = pipeline(share, p.order, p.flops, p.edges, p.shared)
        limits = in_flight_limits(share, times, rooms(replace(p, problem=share)))
        period_s = times.throttled_period_s(limits, share.micro_batches)
        slowest_s = max(slowest_s, times.step_s(share.micro_batches, period_s))
    return slowest_s + sync_s(problem.fleet, plan.sync)


def _abreast(problem: Problem, plan: Plan, placed: Sequence[Placement]) -> Iterator[tuple[str, Problem]]:
    """Devices that are equally slow, all at once: one alone would leave the period to the others."""
    period_s = plan.predicted.period_s
    slow = [d for p in placed for d, s in p.times.device_s.items() if s >= ABREAST * period_s]
    if len(slow) > 1:
        names = " and ".join(slow) if len(slow) <= 3 else f"the {len(slow)} slowest devices"
        yield f"{names} twice as fast, together", replace(problem, fleet=with_speed(problem.fleet, slow, 2.0))


def _better(problem: Problem, plan: Plan) -> Iterator[tuple[str, Problem]]:
    fleet = problem.fleet
    for name in plan.used:
        yield f"{name} twice as fast", replace(problem, fleet=with_speed(fleet, [name], 2.0))
        yield f"{name} with twice the memory", replace(problem, fleet=with_memory_scaled(fleet, [name], 2.0))
    for a, b in linked_devices(plan):
        yield f"twice the bandwidth between {a} and {b}", replace(problem, fleet=with_links(fleet, a, b, bandwidth=2.0))
        yield f"half the latency between {a} and {b}", replace(problem, fleet=with_links(fleet, a, b, latency=0.5))
    for site in fleet.region_info:
        if site.uplink_bytes_per_s is not None:
            yield f"twice the uplink of {site.region}", replace(problem, fleet=with_uplink(fleet, site.region, 2.0))


def linked_devices(plan: Plan) -> list[tuple[str, str]]:
    """Pairs of devices that exchange something, each once."""
    found: dict[tuple[str, str], None] = {}
    for replica in plan.replicas:
        names = [stage.device for stage in replica.stages]
        ends = [(e.source, e.target) for e in replica.edges]
        ends += [(p.owner, user) for p in replica.shared for user in p.users]
        pairs = ((names[min(pair)], names[max(pair)]) for pair in ends)
        found.update(dict.fromkeys((a, b) for a, b in pairs if a != b and (b, a) not in found))
    for group in plan.sync.groups:
        found.update(dict.fromkeys(itertools.combinations(group.devices, 2)))
    return list(found)


def _alternatives(problem: Problem, plan: Plan, name: str) -> Iterator[tuple[str, list[PlanLayout]]]:
    layouts = [layout._replace(recompute=None) for layout in layouts_of(plan)]
    busiest = sorted(
        (
            (problem.cumulative_flops[s.last + 1] - problem.cumulative_flops[s.first])
            / problem.fleet.device(s.device).sustained_flops_per_s,
            r,
            k,
        )
        for r, replica in enumerate(plan.replicas)
        for k, s in enumerate(replica.stages)
    )[::-1]
    for _, r, k in busiest[:MOST_SWAPS]:
        order = layouts[r].order
        swapped = layouts[r]._replace(order=(*order[:k], name, *order[k + 1 :]))
        yield f"in place of {order[k]}", [*layouts[:r], swapped, *layouts[r + 1 :]]
    _, r, k = busiest[0]
    order, boundaries = layouts[r].order, layouts[r].boundaries
    for pair in ((name, order[k]), (order[k], name)):
        middle = _middle(problem, plan.replicas[r].stages[k].first, plan.replicas[r].stages[k].last, pair)
        if middle is not None:
            shared = layouts[r]._replace(
                order=(*order[:k], *pair, *order[k + 1 :]), boundaries=tuple(sorted((*boundaries, middle)))
            )
            yield f"sharing the stage of {order[k]}", [*layouts[:r], shared, *layouts[r + 1 :]]


def _middle(problem: Problem, first: int, last: int, pair: tuple[str, str]) -> int | None:
    """The place at which two devices would share the operators most evenly, by their speeds."""
    work = problem.cumulative_flops
    a, b = (problem.fleet.device(name).sustained_flops_per_s for name in pair)
    wanted = work[first] + (work[last + 1] - work[first]) * a / (a + b)
    places = [cut.position for cut in cuts(problem.flow) if first < cut.position <= last]
    return min(places, key=lambda place: abs(work[place] - wanted), default=None)
