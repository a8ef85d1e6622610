"""The exact interval programme for DreamDDP's problem.

    best[h, end] = min over start of best[h - 1, start] + exposed[end, start]

What an iteration costs depends on the two ends of its interval only, so this is exact in O(H L^2), where the paper
prunes a depth-first search of O(2^min(L-H, H)) leaves (Algorithm 2) and may miss the best plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.plan.sync import SyncPlan
from isthmus.planners.sync.assemble import intervals, sync_plan
from isthmus.planners.sync.problem import SyncProblem
from isthmus.planners.sync.timeline import Floats, interval_exposed_s, timeline


def dream(problem: SyncProblem) -> SyncPlan:
    """The least period of any schedule in intervals, exactly, under the serial channel; bubbles filled past gaps."""
    line = timeline(problem.workers, forward_overlap=problem.forward_overlap)
    ends = cheapest_ends(interval_exposed_s(line), problem.iterations)
    return sync_plan(problem, "dream", intervals(ends), past_gaps=True)


def cheapest_ends(exposed_s: Floats, iterations: int) -> tuple[int, ...]:
    """Where each iteration's interval ends in the cheapest schedule; `exposed_s[end, start]` as in `timeline`.

    Intervals may be empty. Among equal schedules layers go into the earliest iterations: Property 1 of the paper.
    """
    count = len(exposed_s) - 1
    # Starts from high to low, so that the first of equal ones leaves the least to the later iteration.
    falling = np.ascontiguousarray(exposed_s[:, ::-1])
    best, steps = exposed_s[:, 0], np.arange(count + 1)
    chosen: list[NDArray[np.intp]] = []
    for _ in range(iterations - 1):
        total = falling + best[::-1]
        first = total.argmin(axis=1)
        best = total[steps, first]
        chosen.append(count - first)
    ends = [count]
    for starts in reversed(chosen):
        ends.append(int(starts[ends[-1]]))
    return tuple(reversed(ends))
