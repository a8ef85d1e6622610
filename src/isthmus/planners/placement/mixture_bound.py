"""The tighter lower bound where devices are of few kinds: the least D + hops over all gradient times D.

Groupings of few different mixtures are enumerated, those of more are bounded by the linear programmes of `mixtures`.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from isthmus.cost.network import Floats
from isthmus.planners.placement import few_mixtures
from isthmus.planners.placement.few_mixtures import TooManyWays
from isthmus.planners.placement.mixtures import MixtureTables, count_mixtures
from isthmus.planners.placement.problem import PlacementProblem

_MOST_MIXTURES = 15_000
MOST_KINDS = 10
_LARGEST_KEY = 2.0**62
_ROUNDS = 80


def mixture_bound_s(problem: PlacementProblem, known_s: float) -> float:
    """A lower bound on Eq. 2 + Eq. 4 of DT-FM, no higher than `known_s`; 0 where there are too many mixtures."""
    sizes, replicas = problem.kind_sizes, problem.task.replicas
    if len(sizes) > MOST_KINDS or count_mixtures(sizes, replicas) > _MOST_MIXTURES:
        return 0.0
    tables = MixtureTables(problem)
    times = np.unique(tables.sync_s)
    times = times[times < known_s - tables.least_pipeline_s]
    if len(times) == 0:
        return known_s
    if problem.task.stages == 1:
        return min(known_s, float(times[0]))
    return _least_bound(times, tables, known_s)


def _least_bound(times: Floats, tables: MixtureTables, known_s: float) -> float:
    """Groupings of one mixture, of two, .. are enumerated while they are few; then the rest is bounded at once."""
    best, count = known_s, 1
    countable = float(np.prod(tables.sizes + 1.0)) <= _LARGEST_KEY
    while countable and count <= min(few_mixtures.MOST, tables.stages):
        reach = _reach_s(times, tables, count, best)
        if reach is None:
            return best
        try:
            best = min(best, few_mixtures.least_with(count, tables.allowed(reach), tables.sizes, tables.stages))
        except TooManyWays:
            break
        count += 1
    return min(best, _least_sum(times, tables, count, best))


def _reach_s(times: Floats, tables: MixtureTables, count: int, known_s: float) -> float | None:
    """With `count` mixtures or more, longer gradients than this cost more than `known_s`; None where all do."""
    reach = float(times[-1])
    while True:
        shorter = known_s - tables.pipeline_s(reach, count)
        if shorter < float(times[0]):
            return None
        if shorter >= reach:
            return reach
        reach = shorter


def _least_sum(times: Floats, tables: MixtureTables, at_least: int, known_s: float) -> float:
    """min over k of times[k] + pipeline_s(times[k]), which falls in k: intervals are halved, the lowest first."""
    if at_least > tables.stages:
        return math.inf
    last = len(times) - 1
    at_last = tables.pipeline_s(float(times[last]), at_least)
    heap = [(float(times[0]) + at_last, 0, last, at_last)]
    for _ in range(_ROUNDS):
        lowest, low, high, at_high = heap[0]
        if low == high or lowest >= known_s:
            break
        heapq.heappop(heap)
        middle = (low + high) // 2
        at_middle = tables.pipeline_s(float(times[middle]), at_least)
        heapq.heappush(heap, (float(times[low]) + at_middle, low, middle, at_middle))
        heapq.heappush(heap, (float(times[middle + 1]) + at_high, middle + 1, high, at_high))
    return heap[0][0]
