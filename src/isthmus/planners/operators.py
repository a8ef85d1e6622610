"""Plans on a fleet where not every device has every operator of the model.

The planner is asked as if they had. A device that got an operator which it lacks is left out, and the planner asked
again; where nothing is left, each device takes the operators in a row that it has, as many as it can. Our own searches
then improve one pipeline, in which devices that were left out get stages that they have all operators of. A bound that
the planner proved of the whole fleet holds: it ranges over more plans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from isthmus.cost import Problem, build_plan, build_replicas, layouts_of, preference
from isthmus.cost.blocks import Blocks, legal_places
from isthmus.cost.network import network_of
from isthmus.errors import UserError
from isthmus.planners.search.exhaustive import exhaustive_pipeline
from isthmus.planners.search.one_pipeline import improved_by_moves
from isthmus.plans import Plan


def with_operators(problem: Problem, planner: Callable[[Problem], Plan], *, improves: bool) -> Plan:
    """The planner's plan; where it `improves`, one pipeline is improved: on small fleets every one is tried. UserError
    with the operators that no device of the fleet has."""
    check_some_device_has(problem)
    first = planner(problem.everywhere())
    if not _offending(problem, first):
        return msgspec.structs.replace(first, constraints=problem.constraints)
    plan = _without_offending(problem, first, planner)
    if not improves:
        return plan or _in_rows(problem, first.planner)
    if plan is not None and len(plan.replicas) == 1:
        return _improved(problem, plan)
    plans = [plan] if plan is not None else []
    with contextlib.suppress(UserError) if plans else contextlib.nullcontext():
        plans.append(_improved(problem, _in_rows(problem, first.planner)))
    return min(plans, key=lambda found: preference(problem, found))


def _improved(problem: Problem, plan: Plan) -> Plan:
    """One pipeline: the best of all where they are few, and then by moves."""
    better = exhaustive_pipeline(problem, network_of(problem), Blocks(problem), preference(problem, plan)[0])
    if better is not None:
        plan = msgspec.structs.replace(better, planner=plan.planner)
    return improved_by_moves(problem, plan)


def check_some_device_has(problem: Problem) -> None:
    """UserError for operators that every device lacks."""
    lacked = [problem.constraints.lacked_by(name) for name in problem.fleet.names]
    if nobody := sorted(frozenset.intersection(*lacked)):
        raise UserError(
            f"operators: no device of fleet {problem.fleet.name!r} has {', '.join(nobody)}, which the model computes: "
            "expected one, as with engine 'torch' and a version of torch near the coordinator's"
        )


def _offending(problem: Problem, plan: Plan) -> set[str]:
    """Devices with an operator that they lack."""
    workers = (stage for replica in plan.replicas for stage in replica.workers)
    return {stage.device for stage in workers if problem.lacked(stage.device, stage.first, stage.last + 1)}


def _without_offending(problem: Problem, plan: Plan, planner: Callable[[Problem], Plan]) -> Plan | None:
    fleet = problem.fleet
    with contextlib.suppress(UserError):  # without them nothing fits, or no data holder is left
        while offending := _offending(problem, plan):
            fleet = fleet.subset(name for name in fleet.names if name not in offending)
            plan = planner(problem.everywhere().on(fleet))
        layouts = [layout._replace(recompute=None) for layout in layouts_of(plan)]
        return build_replicas(problem, layouts, planner=plan.planner)
    return None


def _in_rows(problem: Problem, planner: str) -> Plan:
    """UserError where the devices do not come to the end, FleetTooSmall where their stages do not fit them."""
    places, order, start = [*legal_places(problem), len(problem.flow.operators)], list[str](), 0
    boundaries: list[int] = []
    while start < places[-1]:
        free = problem.fleet.names if order else problem.constraints.data_holders or problem.fleet.names
        reach = {
            name: max((end for end in places if end > start and not problem.lacked(name, start, end)), default=start)
            for name in free
            if name not in order
        }
        furthest = max(reach, key=reach.__getitem__, default="")
        if not furthest or reach[furthest] == start:
            raise UserError(_stuck(problem, start))
        order.append(furthest)
        boundaries.append(start)
        start = reach[furthest]
    return build_plan(problem, order, boundaries[1:], planner=planner)


def _stuck(problem: Problem, start: int) -> str:
    target = problem.flow.operators[start].target
    lacking = [name for name in problem.fleet.names if target in problem.constraints.lacked_by(name)]
    return (
        f"operators: no plan was found in which every device has the operators of its stage: {target} is lacked by "
        f"{', '.join(lacking) or 'none'}, and devices that have it are used before"
    )
