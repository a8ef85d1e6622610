"""The end that all sync planners share: fill the bubbles, predict the times, name the slowest worker, certify by
a lower bound on the period of any assignment of layers to iterations, in intervals or not."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

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


def fill_bubbles(line: Timeline, chosen: Sequence[int], *, past_gaps: bool, spare_s: float = 0.0) -> tuple[int, ...]:
    """Layers beside `chosen` that an iteration can average without becoming longer, in backward order.

    The paper takes the latest layers {L, ..., l} (Eq. 12, here under the serial channel) and stops at the first that
    does not fit or is in the set. With `past_gaps` later ones are tried too: an output layer as large as all others
    together would else keep everything behind it from being filled. What follows a filling must be through `spare_s`
    before the iteration's end.
    """
    limit_s = iteration_s(line, chosen) * (1 + ROUNDING) - spare_s
    scheduled = frozenset(chosen)
    last = max((layer for layer in scheduled if line.average_s[layer] > 0), default=-1)
    to_come_s = sum(float(line.average_s[layer]) for layer in scheduled)
    channel_s = 0.0
    filled: list[int] = []
    for layer, (ready_s, average_s) in enumerate(zip(line.ready_s.tolist(), line.average_s.tolist(), strict=True)):
        through_s = max(channel_s, ready_s) + average_s
        if layer in scheduled:
            if not past_gaps:
                break
            if average_s > 0:
                to_come_s -= average_s
                channel_s = through_s
        elif average_s > 0:
            if through_s + to_come_s + float(line.tail_s[max(layer, last)]) <= limit_s:
                filled.append(layer)
                channel_s = through_s
            elif not past_gaps:
                break
    return tuple(filled)


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


def exposed_bound_s(line: Timeline, iterations: int) -> float:
    """Seconds per period that no assignment of the layers to `iterations` hides.

    Take any layers Q. The iteration whose earliest layer of Q is a hides at most room_a = compute - start_a of their
    averages, and the earliest layers of different iterations differ. So at least

        sum over Q of average  -  sum of the H largest rooms in Q

    stays exposed (all rooms if Q has no more than H layers). Rooms never grow with a, so the H first layers of Q
    have the largest, and the best Q whose H-th is t takes the H - 1 best of those before t and all that follow t.
    """
    room = np.maximum(line.compute_s - line.start_s, 0.0)
    excess = (line.average_s - room).tolist()
    follow = (line.elapsed_s[-1] - line.elapsed_s[1:]).tolist()
    bound_s = sum(heapq.nlargest(iterations, (e for e in excess if e > 0)))
    best: list[float] = []  # a heap of the H - 1 largest excesses before t
    best_s = 0.0
    for t, excess_s in enumerate(excess):
        if t >= iterations - 1:
            bound_s = max(bound_s, best_s + excess_s + follow[t])
        heapq.heappush(best, excess_s)
        best_s += excess_s
        if len(best) > iterations - 1:
            best_s -= heapq.heappop(best)
    return max(bound_s, 0.0)
