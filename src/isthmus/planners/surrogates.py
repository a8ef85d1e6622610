"""Where a message's bytes depend on the whole plan (AdaTopK, just-enough): problems like it in which they do not.

A search must price a message before it has a plan. So it looks for the best plan with messages as they are, and with
all of them as short as the method ever makes them; what is found is then packed as it will be, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from isthmus.cost import PlanLayout, Problem, build_replicas, layouts_of, preference
from isthmus.cost.compressed import replica_predictions
from isthmus.cost.compression import harshest_codec, packs_alike
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep
from isthmus.planners.shares import share_out
from isthmus.plans import Plan


def surrogates(problem: Problem) -> tuple[Problem, Problem]:
    """With messages as they are, and with all of them as short as can be."""
    shortest = msgspec.structs.replace(problem.constraints, compression=harshest_codec(problem))
    return problem.uncompressed(), replace(problem, constraints=shortest)


def rebuilt(problem: Problem, plan: Plan) -> Plan:
    """A surrogate's plan, packed as the problem asks, and shared out by how fast its replicas are then; what was proven
    of the surrogate is dropped."""
    layouts = [x._replace(recompute=None) for x in layouts_of(plan)]
    made = build_replicas(problem, layouts, planner=plan.planner)
    while len(layouts) > 1 and (other := _shared_anew(problem, made, layouts)) is not None:
        made = other
    return msgspec.structs.replace(made, notes=(*plan.notes[: len(problem.fleet.names)], *made.notes[-1:]))


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
    found: list[Plan] = []
    refused: FleetTooSmall | None = None
    for surrogate in surrogates(problem):
        try:
            found.append(keep(rebuilt(problem, planner(surrogate))))
        except FleetTooSmall as error:
            refused = error
    if not found:
        assert refused is not None, "there are surrogates"
        raise refused
    return min(found, key=lambda plan: preference(problem, plan))
