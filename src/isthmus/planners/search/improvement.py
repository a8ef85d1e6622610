"""Moves with which the searches of `auto` and `chain` end: whole plans, by the formula and then by the steady step.

The best plans at hand are starts for a descent (`descent`), and the best of all is left by random moves. The same
follows by the step that the simulator has (`steady_descent`), where plans have one; then a scorer judges the best.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from isthmus.cost import PlanLayout, Problem, build_replicas, layouts_of, preference
from isthmus.cost.network import FleetNetwork
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep, part
from isthmus.planners.search.descent import Descent, places
from isthmus.planners.search.local_search import TOLERANCE, first_improvement
from isthmus.planners.search.steady_descent import SteadyDescent
from isthmus.plans import Plan

MOST_STARTS = 4  # plans from which the descent starts, and numbers of replicas of which the best plan is another start
MORE_STARTS = 16  # plans that are starts too, as far as these leave neighbours to look at
MOST_NEIGHBOURS, MOST_EACH = 100_000, 12_000
"""Plans that all descents look at together, and one: bounds the time, the same on every machine."""
MOST_KICKED, MOST_KICKED_ALONE = 100_000, 200_000
"""Neighbours of the best of them; of a single pipeline, whose neighbours take a fifth of the time."""
MOST_REPLICAS_KICKED = 12
"""Replicas up to which random moves are tried: with more a neighbour takes milliseconds, and moves gained nothing."""
WORTH_DESCENT = 2.0  # times the best plan known, up to which another is a start
STEADY_STARTS, MOST_STEADY = 3, 20_000  # plans from which the descent by the steady step starts, and its work
KICKS_EACH, MOST_KICKING = 8, 20  # random beginnings near the best plan, for each of so many devices
DESCENT_BLOCKS = 100  # places to which cuts move
LEAST_SCORED = 3  # plans that a scorer judges
MOST_SCORED, MOST_TASKS_SCORED = 32, 20_000
"""Plans that the scorer judges where no steady step ranks them, and forwards in all of them, which bounds its time to
about a second. The closed form may be far off where stages share parameters: of 21 fleets with a tied model the best
was the 11th, 20th and 22nd."""
OVERLAPPING = 14  # times as many steps are simulated of a plan whose steps overlap
EXACT, NEAR = 1e-3, 4.0
"""How far a scorer and the steady step may differ before moves go by the scorer, and times that difference up to which
the steady step of a neighbour that it judges is longer."""
MOST_TASKS_MOVED = 40_000  # forwards and messages of averages in all of them: about two seconds

Score = Callable[[Plan], float]  # seconds per step of a plan, by a better estimate than the closed form: the simulator


def descended(problem: Problem, network: FleetNetwork, plans: Sequence[Plan], planner: str) -> Iterator[Plan]:
    """Yield the results of descents by the formula from the best plans of one replica and of several, whatever has a
    limit, and from random moves of the best."""
    part("moves of cuts and devices")
    free = problem.unlimited(problem.constraints.objective)
    value = {id(plan): preference(free, plan)[0] for plan in plans}
    best = sorted(plans, key=lambda plan: value[id(plan)])
    first_of = {len(plan.replicas): plan for plan in reversed(best)}  # the best with so many replicas
    others = sorted(first_of.values(), key=lambda plan: value[id(plan)])[:MOST_STARTS]
    starts = [*best[:MOST_STARTS], *[p for p in best[MOST_STARTS:] if len(p.replicas) > 1][:1], *others]
    starts += best[MOST_STARTS:MORE_STARTS]
    starts = [plan for plan in starts if value[id(plan)] <= WORTH_DESCENT * value[id(best[0])]]

    def after(start: Plan, most: int, kicks: int = 0) -> tuple[Plan | None, int]:
        """Return the plan after the descent, if it is better, and how many neighbours were looked at."""
        descent = Descent(problem, network, places(problem, layouts_of(start), DESCENT_BLOCKS), most)
        better = descent.run(layouts_of(start), preference(free, start)[0], kicks)
        made = None
        if better is not None:
            with contextlib.suppress(FleetTooSmall):  # two stages may share a device's memory
                made = keep(build_replicas(problem, better[1], planner=planner))
        return made, most - descent.left

    once = {tuple(layouts_of(plan)): plan for plan in starts}.values()
    made, left = list[Plan](), MOST_NEIGHBOURS
    for start in once:
        plan, looked = after(start, min(left, MOST_EACH))
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
            plan, _ = after(best_made, most, _kicks(network))
            if plan is not None:
                yield plan


def by_steady_step(problem: Problem, network: FleetNetwork, plans: Sequence[Plan], planner: str) -> list[Plan]:
    """The best of each cut by their steady steps, with those of descents from the best of them and from random moves of
    the best of all."""
    part("moves by simulated time")
    layouts = {id(plan): layouts_of(plan) for plan in plans}
    every = itertools.chain.from_iterable(layouts.values())
    judge = SteadyDescent(problem, network, places(problem, every, DESCENT_BLOCKS), 0)
    found = sorted(((judge.step_s(layouts[id(plan)]), plan) for plan in plans), key=lambda pair: pair[0])
    best_of: dict[int, Plan] = {}  # the best with so many replicas
    for _, plan in found:
        best_of.setdefault(len(plan.replicas), plan)
    near = [plan for _, plan in found[:STEADY_STARTS]]
    starts = {_cut_of(plan): layouts[id(plan)] for plan in (*near, *list(best_of.values())[:STEADY_STARTS])}
    left, best = MOST_STEADY, (float("inf"), layouts[id(plans[0])])
    for start in (*starts.values(), None):
        descent = SteadyDescent(problem, network, places(problem, start or best[1], DESCENT_BLOCKS), left)
        known = descent.step_s(start or best[1])
        better = descent.run(start or best[1], known, 0 if start else _kicks(network))
        left, best = descent.left, min(best, better or (known, start or best[1]), key=lambda pair: pair[0])
        if better is not None:
            with contextlib.suppress(FleetTooSmall):
                found.append((better[0], keep(build_replicas(problem, better[1], planner=planner))))
    return of_each_cut(plan for _, plan in sorted(found, key=lambda pair: pair[0]))


def of_each_cut(plans: Iterable[Plan]) -> list[Plan]:
    """The first of each cut, in this order."""
    cuts: dict[object, Plan] = {}
    for plan in plans:
        cuts.setdefault(_cut_of(plan), plan)
    return list(cuts.values())


def to_score(plans: Sequence[Plan]) -> list[Plan]:
    """The best of each cut, best first: plans that differ in a codec or a share alone take about the same time."""
    found = of_each_cut(plans)
    tasks = (
        sum(len(r.stages) * r.micro_batches for r in p.replicas) * (OVERLAPPING if p.overlaps else 1) for p in found
    )
    affordable = sum(total <= MOST_TASKS_SCORED for total in itertools.accumulate(tasks))
    return found[: min(MOST_SCORED, max(LEAST_SCORED, affordable))]


def _cut_of(plan: Plan) -> object:
    return frozenset((x.order, x.boundaries) for x in layouts_of(plan))


def judged(problem: Problem, plans: Sequence[Plan], score: Score) -> list[Plan]:
    """The best first, by the scorer."""
    part("simulating the best")
    return sorted(plans, key=lambda plan: preference(problem, plan, score(plan)))


def by_score(problem: Problem, network: FleetNetwork, plans: Sequence[Plan], planner: str, score: Score) -> list[Plan]:
    """The first few by the scorer, the best first.

    Where it differs from the steady step, as of averages that overlap with compute and of shared uplinks, moves of the
    best follow, judged by the scorer.
    """
    scores: dict[tuple[PlanLayout, ...], float] = {}

    def scored(plan: Plan) -> float:
        layouts = tuple(layouts_of(plan))
        if layouts not in scores:
            scores[layouts] = score(plan)
        return scores[layouts]

    def near(now: Plan) -> Iterator[Plan]:
        layouts = layouts_of(now)
        for other in descent.near(layouts, descent.step_s(layouts) * (1 + NEAR * error)):
            with contextlib.suppress(FleetTooSmall):
                yield keep(build_replicas(problem, other, planner=planner))

    found = judged(problem, plans[:LEAST_SCORED], scored)
    layouts = list(map(layouts_of, found))
    descent = SteadyDescent(
        problem, network, places(problem, itertools.chain.from_iterable(layouts), DESCENT_BLOCKS), MOST_STEADY
    )
    error = max(abs(scored(plan) / descent.step_s(own) - 1) for plan, own in zip(found, layouts, strict=True))
    if error > EXACT:
        part("moves by the simulator")
        most = max(LEAST_SCORED, MOST_TASKS_MOVED // _tasks(found[0]))
        found.insert(0, first_improvement(found[0], near, scored, most=most, tolerance=TOLERANCE))
    return found


def _tasks(plan: Plan) -> int:
    """Return about how many forwards and messages of averages a step has."""
    forwards = sum(len(replica.stages) * replica.micro_batches for replica in plan.replicas)
    return forwards + sum(2 * len(group.devices) ** 2 for group in plan.sync.groups)


def _kicks(network: FleetNetwork) -> int:
    """Return how often the best plan is left by random moves."""
    return KICKS_EACH * min(len(network.names), MOST_KICKING)
