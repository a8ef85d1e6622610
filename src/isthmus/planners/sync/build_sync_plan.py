"""The end that all sync planners share: fill the bubbles, predict the times, name the slowest worker, certify."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from isthmus.planners.sync.bound import exposed_bound_s
from isthmus.planners.sync.bubbles import fill_bubbles
from isthmus.planners.sync.problem import SyncProblem
from isthmus.planners.sync.timeline import ROUNDING, Timeline, iteration_s, timeline
from isthmus.plans.plan import Certificate
from isthmus.plans.sync import SyncIteration, SyncPlan, SyncWorker

QUESTION = (
    "the time of a period under any assignment of every layer to one iteration of it, on one serial channel per worker"
)


def intervals(ends: Sequence[int]) -> list[range]:
    """The layers of each iteration, given the number after its last."""
    return [range(start, end) for start, end in pairwise((0, *ends))]


def sync_plan(problem: SyncProblem, planner: str, sets: Sequence[Sequence[int]], *, past_gaps: bool) -> SyncPlan:
    """The plan whose iterations average `sets`: ascending numbers in backward order, every layer in one of them."""
    missing = {*range(len(problem.layers))} ^ {*chain.from_iterable(sets)}
    assert not missing, f"{planner}: layers {missing} are not scheduled"
    line = timeline(problem.workers, forward_overlap=problem.forward_overlap)
    names = problem.layers[::-1]
    iterations: list[SyncIteration] = []
    averaged: list[list[int]] = []
    for chosen in sets:
        filled = fill_bubbles(line, chosen, past_gaps=past_gaps, spare_s=problem.spare * line.compute_s)
        taken_s = iteration_s(line, chosen)
        averaged.append(sorted({*chosen, *filled}))
        iterations.append(
            SyncIteration(
                scheduled=tuple(names[layer] for layer in chosen),
                filled=tuple(names[layer] for layer in filled),
                iteration_s=taken_s,
                exposed_s=_exposed_s(line, taken_s),
            )
        )
    period_s = sum(iteration.iteration_s for iteration in iterations)
    workers = _workers(problem, averaged, period_s)
    bound_s = problem.iterations * line.compute_s + exposed_bound_s(line, problem.iterations)
    # Sums in another order may put the bound a rounding above an optimal period.
    bound_s = min(bound_s, period_s)
    return SyncPlan(
        planner=planner,
        layers=problem.layers,
        forward_overlap=problem.forward_overlap,
        iterations=tuple(iterations),
        period_s=period_s,
        workers=workers,
        slowest=max(workers, key=lambda w: w.alone_s).worker,
        certificate=Certificate(lower_bound=bound_s, gap=(period_s - bound_s) / bound_s, question=QUESTION),
    )


def _exposed_s(line: Timeline, taken_s: float) -> float:
    over_s = taken_s - line.compute_s
    return over_s if over_s > ROUNDING * line.compute_s else 0.0


def _workers(problem: SyncProblem, averaged: Sequence[Sequence[int]], period_s: float) -> tuple[SyncWorker, ...]:
    found: list[SyncWorker] = []
    for profile in problem.workers:
        own = timeline([profile], forward_overlap=problem.forward_overlap)
        alone_s = sum(iteration_s(own, layers) for layers in averaged)
        found.append(SyncWorker(worker=profile.worker, alone_s=alone_s, waits_s=max(0.0, period_s - alone_s)))
    return tuple(found)
