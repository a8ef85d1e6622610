"""Where a message's bytes depend on the whole plan (AdaTopK, just-enough): problems like it in which they do not.

A search must price a message before it has a plan. So it looks for the best plan with messages as they are, and with
all of them as short as the method ever makes them; what is found is then packed as it will be, and compared. Within a
loss budget milder codecs are tried too, down to one that costs no loss: so no plan takes longer to a loss than one that
packs all messages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from isthmus.cost import PlanLayout, Problem, build_replicas, layouts_of, preference
from isthmus.cost.compressed import replica_predictions
from isthmus.cost.compression import packs_alike, uniform_codecs
from isthmus.errors import FleetTooSmall
from isthmus.expected_loss import increase_of
from isthmus.planners.observer import keep
from isthmus.planners.shares import share_out
from isthmus.plans import Plan


def plans_of_surrogates(problem: Problem, planner: Callable[[Problem], Plan]) -> Iterator[Plan]:
    """What the planner makes of each, packed as the problem asks. FleetTooSmall where it makes nothing of any."""
    asked, fits = problem.constraints.compression, False
    for compression in (None, *uniform_codecs(problem)):
        alike = replace(problem, constraints=msgspec.structs.replace(problem.constraints, compression=compression))
        try:
            plan = planner(alike)
            made = rebuilt(problem, plan)
        except FleetTooSmall:
            if compression is None:
                continue
            if not fits:
                raise
            return
        fits = True
        yield made
        limited = asked is not None and asked.loss_budget is not None
        if compression is not None and not (limited and increase_of(plan.replicas)):
            return


def rebuilt(problem: Problem, plan: Plan) -> Plan:
    """A surrogate's plan, packed as the problem asks, and shared out by how fast its replicas are then; what was proven
    of the surrogate is dropped."""
    found = layouts_of(plan)
    starts = found, [x._replace(recompute=None) for x in found]
    made = min((_shared_out(problem, plan.planner, layouts) for layouts in starts), key=partial(preference, problem))
    return msgspec.structs.replace(made, notes=(*plan.notes[: len(problem.fleet.names)], *made.notes[-1:]))


def _shared_out(problem: Problem, planner: str, layouts: Sequence[PlanLayout]) -> Plan:
    made = build_replicas(problem, layouts, planner=planner)
    while len(layouts) > 1 and (other := _shared_anew(problem, made, layouts)) is not None:
        made = other
    return made


def _shared_anew(problem: Problem, plan: Plan, layouts: Sequence[PlanLayout]) -> Plan | None:
    """None where it is no better, or a replica has no room for its share."""
    times = [(found.fill_s, found.period_s) for found in replica_predictions(problem, plan)]
    shares = share_out(times, problem.micro_batches)
    again = [x._replace(micro_batches=share) for x, share in zip(layouts, shares, strict=True)]
    try:
        other = build_replicas(problem, again, planner=plan.planner)
    except FleetTooSmall:
        return None
    return other if preference(problem, other) < preference(problem, plan) else None


def over_surrogates(problem: Problem, planner: Callable[[Problem], Plan]) -> Plan:
    """The best of what the planner makes of each. Raises what it raises where it makes nothing of any."""
    if packs_alike(problem):
        return planner(problem)
    return min(map(keep, plans_of_surrogates(problem, planner)), key=partial(preference, problem))
