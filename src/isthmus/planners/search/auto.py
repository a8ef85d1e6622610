"""How many replicas, which devices in which, where each is cut, and who takes how much of the batch.

Small problems are settled: every plan is tried (`exhaustive`). On larger ones, the single pipeline of `chain`,
groupings that score well and whole replicas on sets of devices (`replicas`), and the plans of the other planners are
starts for a descent over whole plans (`descent`), by time or money. What is found is judged by the closed form of
`cost`, and the best few by the scorer that the caller injects, if any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec

from isthmus.cost import Problem, build_replicas, is_priced, layouts_of, preference
from isthmus.cost.blocks import Blocks
from isthmus.cost.compression import packs_alike
from isthmus.cost.network import network_of
from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners.baselines.allocation.on_fleet import equal_compute, sky_heuristic
from isthmus.planners.baselines.even import even
from isthmus.planners.baselines.op_fence import op_fence
from isthmus.planners.observer import keep, part
from isthmus.planners.placement.on_fleet import random
from isthmus.planners.search.exhaustive import exhaustive_plan, settles
from isthmus.planners.search.improvement import (
    Score,
    by_score,
    by_steady_step,
    descended,
    judged,
    to_score,
)
from isthmus.planners.search.one_pipeline import chain, fed, unpriced
from isthmus.planners.search.prune_fleet import pruned_fleet
from isthmus.planners.search.replicas import ReplicaSearch, replicas_per_device
from isthmus.planners.search.steady_descent import is_steady
from isthmus.planners.surrogates import over_surrogates, plans_of_surrogates, rebuilt, recombined
from isthmus.plans import Plan

MOST_WHOLE = 256  # devices up to which `op_fence` is asked for a plan of all of them
OTHERS = (even, equal_compute, sky_heuristic, op_fence, random)


def auto(problem: Problem, score: Score | None = None) -> Plan:
    """The fastest plan found over any number of replicas, or the cheapest.

    Within a loss budget it has the least time to a loss. Raises FleetTooSmall with the device that is short, and by
    how much.
    """
    return _best_first(problem, score)[0]


def _best_first(problem: Problem, score: Score | None = None) -> list[Plan]:
    """The plan of `auto`, and others that it found."""
    if problem.constraints.copied:
        return [msgspec.structs.replace(fed(problem), planner="auto")]
    if problem.constraints.objective == "cost" and not is_priced(problem.fleet) and not problem.constraints.limited:
        return [unpriced(problem, auto(problem.timed(), score))]
    network, blocks = network_of(problem), Blocks(problem)
    near = pruned_fleet(problem, network, blocks)
    if near is not problem:
        found = list(_wide(problem))
        part(f"{len(near.fleet.names)} of {len(problem.fleet.names)} devices")
        try:
            found.insert(0, build_replicas(problem, layouts_of(auto(near, score)), planner="auto"))
        except FleetTooSmall:
            if not found:
                raise
        plan = min(found, key=lambda plan: preference(problem, plan))
        return [_named(problem, plan, near.fleet.names)]
    refused: FleetTooSmall | None = None
    plans: list[Plan] = []
    part("one pipeline")
    try:
        plans.append(chain(problem))
    except FleetTooSmall as error:
        refused = error
    alike = packs_alike(problem)
    if not alike:
        with contextlib.suppress(FleetTooSmall):
            plans = recombined(problem, [*plans, *plans_of_surrogates(problem, _best_first)])
    plans += _extremes(problem) if problem.constraints.limited else ()
    settled = None
    if settles(problem):
        part("every plan")
        settled = exhaustive_plan(problem, network, blocks, _best_s(plans))
    if settled is not None:
        plans += settled if alike else [rebuilt(problem, plan) for plan in settled]
        plans += _others(problem) if score is not None or not alike else ()
    elif alike and (plans or settles(problem)):  # else all this was done for each way to pack alike
        plans += _others(problem)
        part("several pipelines")
        plans += ReplicaSearch(problem, network, blocks).cut(_best_s(plans))
        part("a replica per device")
        plans += replicas_per_device(problem)
        plans += descended(problem, network, plans, "auto")
    if not plans:
        assert refused is not None, "a plan of chain is a plan"
        raise refused
    # step = max over replicas (fill_r + (m_r - 1) * period_r) + averaging, or its price
    plans.sort(key=lambda plan: preference(problem, plan))
    if score is not None and is_steady(problem):
        plans = by_score(problem, network, by_steady_step(problem, network, plans, "auto"), "auto", score)
    elif score is not None:
        plans = judged(problem, to_score(plans), score)
    return [_named(problem, plans[0], problem.fleet.names), *plans[1:]]


def _wide(problem: Problem) -> Iterator[Plan]:
    """Yield the plans of quick planners for a fleet that was narrowed."""
    with contextlib.suppress(FleetTooSmall):
        if problem.constraints.objective == "cost" or problem.constraints.limited:  # else it narrows the fleet alike
            yield chain(problem)
    if len(problem.fleet.names) <= MOST_WHOLE and not problem.constraints.data_holders:
        with contextlib.suppress(UserError):
            yield keep(op_fence(problem))


def _others(problem: Problem) -> Iterator[Plan]:
    """Yield the plans of the other planners, as far as they are quick: they put any part of the model anywhere."""
    if problem.constraints.data_holders:
        return
    for planner in OTHERS:
        part(f"as {planner.__name__.replace('_', '-')} would")
        with contextlib.suppress(UserError):  # it does not fit their way, or the devices do not factor
            yield keep(over_surrogates(problem, planner))


def _extremes(problem: Problem) -> Iterator[Plan]:
    """Under a limit: the fastest and the cheapest plan without one."""
    for other in (problem.unlimited("time"), problem.unlimited("cost")):
        with contextlib.suppress(FleetTooSmall):
            yield msgspec.structs.replace(auto(other), constraints=problem.constraints)


def _best_s(plans: Sequence[Plan]) -> float:
    return min((plan.predicted.step_s for plan in plans), default=float("inf"))


def _named(problem: Problem, plan: Plan, looked_at: Sequence[str]) -> Plan:
    """The plan under this planner's name, and why each device that it leaves out is."""
    used, known, priced = set(plan.devices), set(looked_at), problem.constraints.objective == "cost"
    alone = f"; several replicas are not possible: {problem.not_summed}" if problem.not_summed is not None else ""
    near = f"no plan that was found is {'cheaper' if priced else 'faster'} with it{alone}"
    far = f"it is not among the {len(known)} that are fastest, or nearest to those, and was not looked at"
    names = problem.fleet.names
    notes = [
        note if name in used else f"{name} is left out: {near if name in known else far}"
        for name, note in zip(names, plan.notes, strict=False)
    ]
    return msgspec.structs.replace(plan, planner="auto", notes=(*notes, *plan.notes[len(names) :]))
