"""A lower bound on the period of any assignment of layers to iterations, in intervals or not."""

from __future__ import annotations

import heapq

import numpy as np

from isthmus.planners.sync.timeline import Timeline


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
