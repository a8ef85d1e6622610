"""How many replicas, which devices in which, where each is cut, and who takes how much of the batch.

Small problems are settled: every plan is tried (`exhaustive`). On larger ones, the single pipeline of `chain`,
groupings that score well and whole replicas on sets of devices (`replicas`), and the plans of the other planners are
starts for a descent over whole plans (`descent`), by time or money. What is found is judged by the closed form of
`cost`, and the best few by the scorer that the caller injects, if any.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from isthmus.cost import PlanLayout, Problem, build_replicas, is_priced, layouts_of, preference
from isthmus.cost.blocks import Blocks, coarse
from isthmus.cost.compression import packs_alike
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners.baselines.allocation.on_fleet import certified, equal_compute, sky_heuristic
from isthmus.planners.baselines.even import even
from isthmus.planners.baselines.op_fence import op_fence
from isthmus.planners.observer import keep, part
from isthmus.planners.placement.on_fleet import random
from isthmus.planners.search.descent import Descent
from isthmus.planners.search.exhaustive import exhaustive_plan, settles
from isthmus.planners.search.one_pipeline import chain, fed, unpriced
from isthmus.planners.search.prune_fleet import pruned_fleet
from isthmus.planners.search.replicas import ReplicaSearch, replicas_per_device
from isthmus.planners.search.steady_descent import SteadyDescent, is_steady
from isthmus.planners.surrogates import over_surrogates, plans_of_surrogates, rebuilt, recombined
from isthmus.plans import Plan

MOST_STARTS = 4  # plans from which the descent starts, and numbers of replicas of which the best plan is another start
MORE_STARTS = 16  # plans that are starts too, as far as these leave neighbours to look at
MOST_NEIGHBOURS, MOST_EACH = 100_000, 12_000
"""Plans that all descents look at together, and one: bounds the time, the same on every machine."""
LEAST_SCORED, MOST_SCORED, MOST_TASKS_SCORED = 3, 32, 20_000
"""Plans that the scorer judges, and forwards in all of them, which bounds its time to about a second. The closed form
may be far off where stages share parameters: of 21 fleets with a tied model the best was the 11th, 20th and 22nd."""
MOST_KICKED, MOST_KICKED_ALONE = 100_000, 200_000
"""Neighbours of the best of them; of a single pipeline, whose neighbours take a fifth of the time."""
KICKS_EACH, MOST_KICKING = 8, 20  # random beginnings near it, for each of so many devices
MOST_REPLICAS_KICKED = 12
"""Replicas up to which random moves are tried: with more a neighbour takes milliseconds, and moves gained nothing."""
STEADY_STARTS, MOST_STEADY = 3, 20_000  # plans from which the descent by the steady step starts, and its work
DESCENT_BLOCKS = 100
WORTH_DESCENT = 2.0  # times the best plan known, up to which another is a start
MOST_WHOLE = 256  # devices up to which `op_fence` is asked for a plan of all of them
OTHERS = (even, equal_compute, sky_heuristic, certified, op_fence, random)

Score = Callable[[Plan], float]  # seconds per step of a plan, by a better estimate than the closed form: the simulator


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
    steady = score is not None and is_steady(problem)
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
        part("moves of cuts and devices")
        plans += _descended(problem, network, plans)
    if not plans:
        assert refused is not None, "a plan of chain is a plan"
        raise refused
    # step = max over replicas (fill_r + (m_r - 1) * period_r) + averaging, or its price
    plans.sort(key=lambda plan: preference(problem, plan))
    if steady:
        part("moves by simulated time")
        plans = _steadily(problem, network, plans)
    if score is not None:
        part("simulating the best")
        plans = _judged(problem, plans[:LEAST_SCORED] if steady else _to_score(plans), score)
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


def _to_score(plans: Sequence[Plan]) -> list[Plan]:
    """The best of each cut, best first: plans that differ in a codec or a share alone take about the same time."""
    found = _of_each_cut(plans)
    tasks = itertools.accumulate(sum(len(r.stages) * r.micro_batches for r in plan.replicas) for plan in found)
    affordable = sum(total <= MOST_TASKS_SCORED for total in tasks)
    return found[: min(MOST_SCORED, max(LEAST_SCORED, affordable))]


def _of_each_cut(plans: Iterable[Plan]) -> list[Plan]:
    """The first of each cut, in this order."""
    cuts: dict[object, Plan] = {}
    for plan in plans:
        cuts.setdefault(_cut_of(plan), plan)
    return list(cuts.values())


def _cut_of(plan: Plan) -> object:
    return frozenset((x.order, x.boundaries) for x in layouts_of(plan))


def _judged(problem: Problem, plans: Sequence[Plan], score: Score) -> list[Plan]:
    """The best first."""
    return sorted(plans, key=lambda plan: preference(problem, plan, score(plan)))


def _best_s(plans: Sequence[Plan]) -> float:
    return min((plan.predicted.step_s for plan in plans), default=float("inf"))


def _descended(problem: Problem, network: FleetNetwork, plans: Sequence[Plan]) -> Iterator[Plan]:
    """Yield the results of the descent from the best plans of one replica and of several, whatever has a limit, and
    from random moves of the best."""
    free = problem.unlimited(problem.constraints.objective)
    value = {id(plan): preference(free, plan)[0] for plan in plans}
    best = sorted(plans, key=lambda plan: value[id(plan)])
    first_of = {len(plan.replicas): plan for plan in reversed(best)}  # the best with so many replicas
    others = sorted(first_of.values(), key=lambda plan: value[id(plan)])[:MOST_STARTS]
    starts = [*best[:MOST_STARTS], *[p for p in best[MOST_STARTS:] if len(p.replicas) > 1][:1], *others]
    starts += best[MOST_STARTS:MORE_STARTS]
    starts = [plan for plan in starts if value[id(plan)] <= WORTH_DESCENT * value[id(best[0])]]

    def descended(start: Plan, most: int, kicks: int = 0) -> tuple[Plan | None, int]:
        """Return the plan after the descent, if it is better, and how many neighbours were looked at."""
        descent = Descent(problem, network, _places(problem, layouts_of(start)), most)
        better = descent.run(layouts_of(start), preference(free, start)[0], kicks)
        made = None
        if better is not None:
            with contextlib.suppress(FleetTooSmall):  # two stages may share a device's memory
                made = keep(build_replicas(problem, better[1], planner="auto"))
        return made, most - descent.left

    once = {tuple(layouts_of(plan)): plan for plan in starts}.values()
    made, left = list[Plan](), MOST_NEIGHBOURS
    for start in once:
        plan, looked = descended(start, min(left, MOST_EACH))
        if plan is not None:
            made.append(plan)
        left -= looked
        if left <= 0:
            break
    yield from made
    if starts:
        best_made = min((*made, *starts), key=lambda plan: preference(free, plan))
        if len(best_made.replicas) <= MOST_REPLICAS_KICKED:
            most = MOST_KICKED if len(best_made.replicas) > 1 else MOST_KICKED_ALONE
            plan, _ = descended(best_made, most, KICKS_EACH * min(len(problem.fleet.names), MOST_KICKING))
            if plan is not None:
                yield plan


def _steadily(problem: Problem, network: FleetNetwork, plans: Sequence[Plan]) -> list[Plan]:
    """The plans by their steady steps, with those of descents from the best of them and from random moves of the best
    of all."""
    layouts = {id(plan): layouts_of(plan) for plan in plans}
    judge = SteadyDescent(problem, network, _places(problem, list(itertools.chain(*layouts.values()))), 0)
    found = sorted(((judge.step_s(layouts[id(plan)]), plan) for plan in plans), key=lambda pair: pair[0])
    best_of: dict[int, Plan] = {}  # the best with so many replicas
    for _, plan in found:
        best_of.setdefault(len(plan.replicas), plan)
    near = [plan for _, plan in found[:STEADY_STARTS]]
    starts = {_cut_of(plan): layouts[id(plan)] for plan in (*near, *list(best_of.values())[:STEADY_STARTS])}
    left, best, kicks = (
        MOST_STEADY,
        (float("inf"), layouts[id(plans[0])]),
        KICKS_EACH * min(len(network.names), MOST_KICKING),
    )
    for start in (*starts.values(), None):
        descent = SteadyDescent(problem, network, _places(problem, start or best[1]), left)
        known = descent.step_s(start or best[1])
        better = descent.run(start or best[1], known, 0 if start else kicks)
        left, best = descent.left, min(best, better or (known, start or best[1]), key=lambda pair: pair[0])
        if better is not None:
            with contextlib.suppress(FleetTooSmall):
                found.append((better[0], keep(build_replicas(problem, better[1], planner="auto"))))
    return _of_each_cut(plan for _, plan in sorted(found, key=lambda pair: pair[0]))


def _places(problem: Problem, layouts: Sequence[PlanLayout]) -> Blocks:
    """Where cuts may be moved to: so many places, and their own."""
    used = {position for layout in layouts for position in layout.boundaries}
    return Blocks(problem, sorted({*coarse(Blocks(problem), DESCENT_BLOCKS).places[1:-1], *used}))


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
