"""Why a plan looks as it does, in sentences: every number in them is computed from the plan and its problem."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cost import (
    Placement,
    PlanLayout,
    Problem,
    build_again,
    build_replicas,
    in_flight_limits,
    is_priced,
    layouts_of,
    place,
    step_price,
)
from isthmus.cost.placement import rooms
from isthmus.cost.stage_costs import compute_s
from isthmus.cost.steptime import pipeline
from isthmus.cost.sync import sync_s
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.fleet.edits import with_links, with_memory_scaled, with_speed, with_uplink
from isthmus.graph import cuts
from isthmus.plans import Plan, Replica, ReplicaSync, SyncGroup
from isthmus.report.tables import certificate_text
from isthmus.units import format_bandwidth, format_duration, format_size

SteadySeconds = Callable[[Plan, Fleet], float]  # of a simulated step of the plan on a fleet
MOST_TIMED = 12  # changes, the best by the formula, that are simulated
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


def improvements(problem: Problem, plan: Plan, steady_s: SteadySeconds | None = None) -> list[Improvement]:
    """Each device, link and uplink that the plan uses made twice as good, one at a time; the best first. With
    `steady_s` the best few by the formula, by their simulated steps."""
    problem = problem.under(plan.replicas[0].schedule)
    placed = placements(problem, plan)
    now_s = _changed_step_s(problem, plan, placed)
    better = [*_better(problem, plan), *_abreast(problem, plan, placed)]
    changes = [(_change(what, now_s, _changed_step_s(changed, plan, placed)), changed) for what, changed in better]
    changes.sort(key=lambda pair: pair[0].step_s)
    found = [change for change, _ in changes]
    if steady_s is not None:
        now_s, layouts = steady_s(plan, problem.fleet), layouts_of(plan)
        again = [(c.what, build_again(changed, layouts, plan), changed) for c, changed in changes[:MOST_TIMED]]
        found = [_change(what, now_s, steady_s(other, changed.fleet)) for what, other, changed in again]
    return sorted(found, key=lambda change: change.step_s)


def with_device(problem: Problem, plan: Plan, name: str, steady_s: SteadySeconds | None = None) -> Improvement | None:
    """The best by the formula of the plans tried that use a device which this one leaves out: in place of another, or
    sharing the slowest stage with its device. None where it fits nowhere. With `steady_s` by its simulated step."""
    problem = problem.under(plan.replicas[0].schedule)
    found: list[tuple[str, Plan]] = []
    for what, layouts in _alternatives(problem, plan, name):
        with contextlib.suppress(UserError):  # it does not fit, or breaks the plan's terms
            found.append((what, build_replicas(problem, layouts, planner="tried")))
    if not found:
        return None
    what, tried = min(found, key=lambda pair: pair[1].predicted.step_s)
    now_s, then_s = ((steady_s or _by_formula)(each, problem.fleet) for each in (plan, tried))
    return _change(what, now_s, then_s)


def _by_formula(plan: Plan, fleet: Fleet) -> float:
    return plan.predicted.step_s


def _change(what: str, now_s: float, then_s: float) -> Improvement:
    return Improvement(what=what, step_s=then_s, saved=1 - then_s / now_s if now_s else 0.0)


def _changed_step_s(problem: Problem, plan: Plan, placed: Sequence[Placement]) -> float:
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
    pairs: list[tuple[str, str]] = []
    for replica in plan.replicas:
        names = [stage.device for stage in replica.stages]
        ends = [(e.source, e.target) for e in replica.edges]
        ends += [(p.owner, user) for p in replica.shared for user in p.users]
        pairs += ((names[min(pair)], names[max(pair)]) for pair in ends)
    for group in plan.sync.groups:
        pairs += itertools.combinations(group.devices, 2)
    return list({frozenset(pair): pair for pair in reversed(pairs) if pair[0] != pair[1]}.values())[::-1]


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


MOST_CHANGES = 5
LEAST_SAVED = 0.0005  # share of a step: less is not worth a line
MOST_LEFT_OUT = 8
MOST_CROSSINGS = 24


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Sentences by subject, and the changes that would help most, the best first."""

    step: tuple[str, ...]
    bottleneck: tuple[str, ...]
    stages: tuple[str, ...]
    links: tuple[str, ...]
    left_out: tuple[str, ...]
    helps: tuple[Improvement, ...]


def explain(problem: Problem, plan: Plan, steady_s: SteadySeconds | None = None) -> Explanation:
    """Explains a plan: the work of each stage and the bottleneck; what would help by `steady_s`, or by the formula.
    Raises UserError if the plan does not fit the problem."""
    placed = placements(problem, plan)
    steps_s = [_step_s(p, r) for p, r in zip(placed, plan.replicas, strict=True)]
    slowest = max(range(len(placed)), key=steps_s.__getitem__)
    return Explanation(
        step=tuple(_step(problem, plan, placed[slowest], steps_s)),
        bottleneck=tuple(_bottleneck(placed[slowest], plan.replicas[slowest])),
        stages=tuple(_stages(problem, plan, placed)),
        links=tuple(_links(problem, plan, placed)),
        left_out=tuple(_left_out(problem, plan, steady_s)),
        helps=tuple(c for c in improvements(problem, plan, steady_s)[:MOST_CHANGES] if c.saved >= LEAST_SAVED),
    )


def explanation_text(explanation: Explanation) -> RenderableType:
    """One heading per subject that has something to say."""
    helps = [
        f"{change.what}: a step of {format_duration(change.step_s)}, saves {change.saved:.1%}"
        for change in explanation.helps
    ] or ["no single device, link or uplink twice as good would save 0.05 % of a step"]
    sections = (
        ("The step", explanation.step),
        ("What sets the pace", explanation.bottleneck),
        ("Who does what", explanation.stages),
        ("What crosses links", explanation.links),
        ("Who is left out", explanation.left_out),
        ("What would help most, with the plan as it is (planning anew may save more)", helps),
    )
    parts: list[Text] = []
    for title, lines in sections:
        if lines:
            parts += [Text(title, "bold"), *(Text(f"  {line}") for line in lines), Text()]
    return Group(*parts)


def _period_s(placed: Placement, replica: Replica) -> float:
    return placed.times.throttled_period_s(replica.schedule.in_flight, replica.micro_batches)


def _step_s(placed: Placement, replica: Replica) -> float:
    return placed.times.step_s(replica.micro_batches, _period_s(placed, replica))


def _step(problem: Problem, plan: Plan, slowest: Placement, steps_s: Sequence[float]) -> Iterator[str]:
    said, times = plan.predicted, slowest.times
    compute_s = sum(times.compute_s) - times.hidden_s
    share = slowest.problem.micro_batches
    yield (
        f"By the formula a step takes {format_duration(said.step_s)}: "
        f"{format_duration(said.fill_s)} for one micro-batch alone "
        f"({format_duration(compute_s)} computing, {format_duration(said.fill_s - compute_s)} on links), then "
        f"{share - 1} more, one every {format_duration(said.period_s)}. FusionLLM's Eq. 3, which counts the latency of "
        f"each, says {format_duration(said.eq3_step_s)}."
    )
    if times.shared_s:
        yield f"Shared parameters travel once per step, which takes {format_duration(times.shared_s)} of it."
    if said.sync_s:
        others = ", ".join(format_duration(s) for s in sorted(steps_s, reverse=True))
        yield (
            f"{len(plan.replicas)} replicas take {others}; averaging their gradients "
            f"{format_duration(said.sync_s)}, {said.sync_s / said.step_s:.1%} of the step."
        )
    work = problem.cumulative_flops[-1]
    speed = sum(problem.fleet.device(name).sustained_flops_per_s for name in plan.used)
    busy = plan.micro_batches * work / speed / said.expected_s if said.expected_s else 0.0
    used = f"{len(plan.used)} of {len(problem.fleet.names)}"
    yield f"Devices in use: {used}; weighted by their speeds they compute {busy:.1%} of the time."
    yield from _constraints(problem, plan)
    if plan.certificate is not None:
        yield f"{certificate_text(plan.certificate)}."


def _constraints(problem: Problem, plan: Plan) -> Iterator[str]:
    """Yield the constraints besides time, and the plan's price where anything has a price."""
    constraints = problem.constraints
    if is_priced(problem.fleet):
        price = step_price(plan, problem.fleet, plan.predicted.expected_s)
        yield (
            f"1,000 steps cost {1000 * price.total:.4g} in the fleet's unit: {1000 * price.devices:.4g} for devices, "
            f"{1000 * price.egress:.4g} for bytes that leave priced sites"
            f"{'; the plan was made to cost little' if constraints.objective == 'cost' else ''}."
        )
    if constraints.copied:
        parts = zip(constraints.feeders, constraints.shares, strict=True)
        text = " and ".join(f"{name} {share:.1%} of the micro-batches" for name, share in parts)
        yield f"Each holder feeds the chain with its own data, by a copy of the first stage: {text}."
    elif constraints.data_holders:
        yield f"Only {', '.join(constraints.data_holders)} may read the data: the first stage runs there."
    if constraints.data_holders:
        if constraints.labels_stay:
            yield "Labels stay there too: so does the last stage, with every operator that takes labels."
        else:
            yield "Labels, and other columns that later stages take, are sent on from the first stage."


def _claims(placed: Placement, replica: Replica) -> list[tuple[float, str]]:
    """(seconds per micro-batch, what takes them) of all that could set the period, the longest first."""
    times = placed.times
    found = [(s, f"device {name}, computing") for name, s in times.device_s.items()]
    there = {(times.devices[e.source], times.devices[e.target]) for e in times.edges}
    back = {(b, a) for a, b in there}
    for (a, b), seconds in times.link_s.items():
        words = [word for word, pairs in (("activations", there), ("gradients", back)) if (a, b) in pairs]
        found += [(seconds, f"link {a} -> {b}, {' and '.join(words)}")]
    found += [(s, f"the shared uplink of {region}") for region, s in times.uplinks_s]
    # A limit that hides the round trip is a choice; only one that does not is for want of memory.
    limits = replica.schedule.in_flight
    found += [
        (seconds, f"memory of {times.devices[stage]}, which holds {limits[stage]} micro-batches at once")
        for stage, seconds in times.held_up_s(limits, replica.micro_batches).items()
        if seconds > times.bottleneck[0]
    ]
    return sorted(found, key=lambda claim: -claim[0])


def _bottleneck(placed: Placement, replica: Replica) -> Iterator[str]:
    (first_s, first), *others = _claims(placed, replica)
    yield f"{first}: {format_duration(first_s)} per micro-batch."
    for seconds, name in others[:2]:
        behind = 1 - seconds / first_s if first_s else 0.0
        yield f"Next is {name}: {format_duration(seconds)}, {behind:.1%} less."
    if replica.micro_batches == 1:
        yield "With one micro-batch nothing overlaps: the step is the sum of all compute and all messages."


def _stages(problem: Problem, plan: Plan, placed: Sequence[Placement]) -> Iterator[str]:
    work = max(problem.cumulative_flops[-1], 1)
    for number, (p, replica) in enumerate(zip(placed, plan.replicas, strict=True)):
        if len(plan.replicas) > 1:
            yield (
                f"Replica {number} takes {replica.micro_batches} of {plan.micro_batches} micro-batches, "
                f"{format_duration(_step_s(p, replica))}:"
            )
        period_s, parts = (
            _period_s(p, replica),
            dict(zip(plan.constraints.feeders, plan.constraints.shares, strict=True)),
        )
        for k, stage in zip(replica.stage_of, replica.workers, strict=True):
            flops = (stage.flops_forward + stage.flops_backward) * parts.get(stage.device, 1.0)
            busy_s = compute_s(problem, stage.device, flops)
            share = (problem.cumulative_flops[stage.last + 1] - problem.cumulative_flops[stage.first]) / work
            room, held = problem.offered_bytes(stage.device), replica.schedule.in_flight[k]
            yield (
                f"{stage.device}: operators {stage.first}..{stage.last}, {share:.1%} of the FLOPs, computes "
                f"{busy_s / period_s if period_s else 0:.0%} of each period; "
                f"{format_size(stage.memory.total)} of {format_size(room)}{problem.constraints.after_headroom}, "
                f"{held} micro-batch{'es' if held > 1 else ''} in flight"
            )
            if p.times.apart_s and p.times.apart_s[k]:
                waits = format_duration(p.times.apart_s[k])
                yield f"{stage.device} sends its gradients before it computes those of its weights, which takes {waits}"
            if stage.recompute:
                yield f"{stage.device} {_recomputes(p, replica, k)}"


def _recomputes(placed: Placement, replica: Replica, stage: int) -> str:
    """Describe the cost and the gain of a stage's second forward."""
    size, again = placed.sizes[stage], replica.stages[stage].memory
    room = placed.problem.offered_bytes(placed.order[stage])
    most = max(0, size.most_in_flight(room, replica.micro_batches))
    return (
        f"computes its forward again in each backward, {format_duration(placed.times.forward_s[stage])}: it keeps "
        f"{format_size(size.kept(True))} per micro-batch in flight and {format_size(again.recomputed)} once, and would "
        f"keep {format_size(size.kept(False))} each otherwise, which leaves room for {most}"
    )


def _links(problem: Problem, plan: Plan, placed: Sequence[Placement]) -> Iterator[str]:
    lines = [line for pair in zip(placed, plan.replicas, strict=True) for line in _crossings(problem, *pair)]
    lines += [
        f"{', '.join(group.devices)} sum {format_size(group.size_bytes)} of {plan.sync.averages} "
        f"({group.collective.kind}), {_often(plan.sync, group)}"
        for group in plan.sync.groups
    ]
    yield from lines[:MOST_CROSSINGS]
    if len(lines) > MOST_CROSSINGS:
        yield f"... and {len(lines) - MOST_CROSSINGS} more"


def _often(sync: ReplicaSync, group: SyncGroup) -> str:
    return "once per step" if sync.period == 1 else f"in {len(group.iterations)} of {sync.period} steps"


def _crossings(problem: Problem, placed: Placement, replica: Replica) -> Iterator[str]:
    names, fleet, period_s = placed.order, problem.fleet, _period_s(placed, replica)
    parts = dict(zip(problem.constraints.feeders, problem.constraints.shares, strict=True))
    for edge, time in zip(placed.edges, placed.times.edges, strict=True):
        a, b = names[edge.source], names[edge.target]
        if a == b:
            yield f"{a} keeps {format_size(edge.forward_bytes)} for its later stage: nothing crosses a link"
            continue
        link, far = fleet.link(a, b), fleet.device(a).region != fleet.device(b).region
        where = f"{fleet.device(a).region} to {fleet.device(b).region}" if far else f"inside {fleet.device(a).region}"
        wire_s = max(time.forward_wire_s, time.backward_wire_s) * min(parts.get(a, 1.0), parts.get(b, 1.0))
        busy = wire_s / period_s if period_s else 0.0
        yield (
            f"{a} -> {b} ({where}, {format_bandwidth(link.bandwidth_bytes_per_s)}, "
            f"{format_duration(link.latency_s)}): {format_size(edge.forward_bytes)} there in "
            f"{format_duration(time.forward_s)}, {format_size(edge.backward_bytes)} back in "
            f"{format_duration(time.backward_s)}; busy {busy:.0%} of each period"
        )
    for p in replica.shared:
        users = ", ".join(names[user] for user in p.users)
        yield f"{names[p.owner]} sends its parameter {p.name} ({format_size(p.size_bytes)}) to {users}, once per step"


def _left_out(problem: Problem, plan: Plan, steady_s: SteadySeconds | None) -> Iterator[str]:
    idle = [name for name in problem.fleet.names if name not in set(plan.devices)]
    for name in itertools.islice(idle, MOST_LEFT_OUT):
        best = with_device(problem, plan, name, steady_s)
        if best is None:
            yield f"{name}: no stage fits it, in place of another device or beside it"
        elif best.saved > LEAST_SAVED:
            yield f"{name}: {best.what} a step would be {best.saved:.1%} shorter, which planner {plan.planner} missed"
        else:
            # A plan that is hardly longer is no reason to use one more device.
            longer = f"{-best.saved:.1%} longer" if best.saved < -LEAST_SAVED else "no shorter"
            yield f"{name}: the best place found for it is {best.what}, and a step would be {longer}"
    if len(idle) > MOST_LEFT_OUT:
        yield f"... and {len(idle) - MOST_LEFT_OUT} more, for which no place was tried"
