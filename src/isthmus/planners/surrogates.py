"""Where a message's bytes depend on the whole plan (AdaTopK, just-enough): problems like it in which they do not.

A search must price a message before it has a plan. So it looks for the best plan with messages as they are, and with
all of them as short as the method ever makes them; what is found is then packed as it will be, and compared. Within a
loss budget milder codecs are tried too, down to one that costs no loss: so no plan takes longer to a loss than one that
packs all messages alike. The best plan of a surrogate need not be the best when packed: `auto` packs what it found
beside it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from isthmus.cost import PlanLayout, Problem, build_replicas, layouts_of, preference
from isthmus.cost.compressed import replica_predictions
from isthmus.cost.compression import packs_alike, uniform_codecs
from isthmus.errors import FleetTooSmall
from isthmus.expected_loss import increase_of
from isthmus.planners.observer import keep
from isthmus.planners.search.local_search import share_out
from isthmus.plans import Plan

PROMISING = 1.5
"""Times the best packed plan: what a planner found beside its best plan, and what takes longer, is not packed."""
MOST_GROUPINGS = 3  # groupings of devices whose pipelines are recombined

Cut = tuple[tuple[str, ...], tuple[int, ...]]  # devices in order, and the boundaries of their stages


def plans_of_surrogates(problem: Problem, planner: Callable[[Problem], Sequence[Plan]]) -> list[Plan]:
    """The planner's plans of each surrogate, best first, compressed as asked. FleetTooSmall where there are none."""
    asked, made = problem.constraints.compression, dict[tuple[PlanLayout, ...], Plan]()
    missing: FleetTooSmall | None = None
    for compression in (None, *uniform_codecs(problem)):
        alike = replace(problem, constraints=msgspec.structs.replace(problem.constraints, compression=compression))
        try:
            found = planner(alike)
            first, key = rebuilt(problem, found[0]), _without_choices(found[0])
            made[key] = min(made.get(key, first), first, key=partial(preference, problem))
        except FleetTooSmall as e:
            missing = e
            if compression is None:
                continue
            break
        for plan in found[1:]:
            known = min(preference(problem, other) for other in made.values())
            if _without_choices(plan) not in made and preference(alike, plan)[0] <= PROMISING * known[0]:
                with contextlib.suppress(FleetTooSmall):
                    made[_without_choices(plan)] = rebuilt(problem, plan)
        limited = asked is not None and asked.loss_budget is not None
        if compression is not None and not (limited and increase_of(found[0].replicas)):
            break
    if missing is not None and not made:
        raise missing
    return list(made.values())


def _without_choices(plan: Plan) -> tuple[PlanLayout, ...]:
    """Shares and what is recomputed apart: `rebuilt` chooses both anew."""
    return tuple(x._replace(micro_batches=0, recompute=None) for x in layouts_of(plan))


def recombined(problem: Problem, plans: Sequence[Plan]) -> list[Plan]:
    """The plans, and better ones of their pipelines: each may be cut as under a codec of its own. Of plans whose
    replicas are the same sets of devices, one replica at a time gets another cut that they have for it."""
    ranked = sorted(plans, key=partial(preference, problem))
    cuts: dict[frozenset[str], dict[Cut, PlanLayout]] = {}
    groupings: dict[frozenset[frozenset[str]], Plan] = {}
    for plan in ranked:
        layouts = layouts_of(plan)
        groupings.setdefault(frozenset(frozenset(x.order) for x in layouts), plan)
        for x in layouts:
            cuts.setdefault(frozenset(x.order), {}).setdefault((x.order, x.boundaries), x)
    several = [plan for plan in groupings.values() if len(plan.replicas) > 1][:MOST_GROUPINGS]
    return [*ranked, *(found for plan in several if (found := _recombined(problem, plan, cuts)) is not plan)]


def _recombined(problem: Problem, plan: Plan, cuts: Mapping[frozenset[str], Mapping[Cut, PlanLayout]]) -> Plan:
    for number, replica in enumerate(plan.replicas):
        for other in cuts[frozenset(stage.device for stage in replica.stages)].values():
            layouts = layouts_of(plan)
            now = layouts[number]
            if (now.order, now.boundaries) == (other.order, other.boundaries):
                continue
            layouts[number] = other._replace(micro_batches=now.micro_batches, recompute=None)
            with contextlib.suppress(FleetTooSmall):
                made = keep(_shared_out(problem, plan.planner, layouts))
                plan = min(plan, made, key=partial(preference, problem))
    return plan


def rebuilt(problem: Problem, plan: Plan) -> Plan:
    """A surrogate's plan, packed as the problem asks, and shared out by how fast its replicas are then; what was proven
    of the surrogate is dropped."""
    found = layouts_of(plan)
    starts = found, [x._replace(recompute=None) for x in found]
    made = min((_shared_out(problem, plan.planner, layouts) for layouts in starts), key=partial(preference, problem))
    return msgspec.structs.replace(made, notes=(*plan.notes[: len(problem.fleet.names)], *made.notes[-1:]))


def _shared_out(problem: Problem, planner: str, layouts: Sequence[PlanLayout]) -> Plan:
    """Shares follow the times of the replicas, and times the shares, as long as the plan gets better."""
    made = build_replicas(problem, layouts, planner=planner)
    while len(layouts) > 1:
        times = [(found.fill_s, found.period_s) for found in replica_predictions(problem, made)]
        shares = share_out(times, problem.micro_batches)
        again = [x._replace(micro_batches=share) for x, share in zip(layouts, shares, strict=True)]
        try:
            other = build_replicas(problem, again, planner=planner)
        except FleetTooSmall:  # a replica has no room for its share
            break
        if preference(problem, other) >= preference(problem, made):
            break
        made = other
    return made


def over_surrogates(problem: Problem, planner: Callable[[Problem], Plan]) -> Plan:
    """The best of what the planner makes of each. Raises what it raises where it makes nothing of any."""
    if packs_alike(problem):
        return planner(problem)
    found = plans_of_surrogates(problem, lambda alike: [planner(alike)])
    return min(map(keep, found), key=partial(preference, problem))
