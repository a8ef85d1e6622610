"""The exact interval programme for DreamDDP's problem.

    best[h, end] = min over start of best[h - 1, start] + exposed[end, start]

What an iteration costs depends on the two ends of its interval only, so this is exact in O(H L^2), where the paper
prunes a depth-first search of O(2^min(L-H, H)) leaves (Algorithm 2) and may miss the best plan. Most of the time many
schedules hide everything: the programme compares costs, then how evenly the iterations are loaded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.planners.sync.build_sync_plan import intervals, sync_plan
from isthmus.planners.sync.problem import SyncProblem
from isthmus.planners.sync.timeline import ROUNDING, Floats, interval_exposed_s, timeline
from isthmus.plans.sync import SyncPlan


def dream(problem: SyncProblem) -> SyncPlan:
    """The least period of any schedule in intervals, exactly, under the serial channel; bubbles filled past gaps."""
    line = timeline(problem.workers, forward_overlap=problem.forward_overlap)
    ends = cheapest_ends(interval_exposed_s(line), line.elapsed_s, problem.iterations)
    return sync_plan(problem, "dream", intervals(ends), past_gaps=True)


def cheapest_ends(exposed_s: Floats, elapsed_s: Floats, iterations: int) -> tuple[int, ...]:
    """Where each iteration's interval ends in the cheapest schedule; `exposed_s[end, start]` and `elapsed_s` as in
    `timeline`.

    Among equally cheap schedules that with the least sum of squares of what iterations average: the evenest leaves most
    room for a link that is slower than it was. (Property 1 of the paper puts layers into the earliest iterations that
    hide them, full to the brim.) Intervals may be empty; what is still equal goes into the earliest iterations.
    """
    count = len(exposed_s) - 1
    # Starts from high to low, so that the first of equal ones leaves the least to the later iteration.
    falling = np.ascontiguousarray(exposed_s[:, ::-1])
    squares = np.square(elapsed_s[:, None] - elapsed_s[::-1])
    best, evenness, steps = exposed_s[:, 0], squares[:, -1], np.arange(count + 1)
    chosen: list[NDArray[np.intp]] = []
    for _ in range(iterations - 1):
        total, uneven = falling + best[::-1], squares + evenness[::-1]
        tied = total <= total.min(axis=1, keepdims=True) * (1 + ROUNDING)
        first = np.where(tied, uneven, np.inf).argmin(axis=1)
        best, evenness = total[steps, first], uneven[steps, first]
        chosen.append(count - first)
    ends = [count]
    for starts in reversed(chosen):
        ends.append(int(starts[ends[-1]]))
    return tuple(reversed(ends))
