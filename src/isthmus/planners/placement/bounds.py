"""A lower bound on what any placement costs, for networks of any size.

Gradients take D at least as long as in the best group that each device can be in (`group_bound`). Of the pipeline, let
t(k) be the least threshold such that all hops but k can be up to it. The longest hop takes at least t(0), the second
longest at least t(1), and so on:

    total  >=  min over D of  D + sum over k of t(k, D)

With k hops longer than t, the groups between them are joined by links up to t, and few ways to divide the devices are
left (`stretches`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy.sparse.csgraph import connected_components

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.placement.group_bound import MOST_DEVICES, group_bound_s
from isthmus.planners.placement.mixture_bound import MOST_KINDS, mixture_bound_s
from isthmus.planners.placement.problem import PlacementProblem
from isthmus.planners.placement.stretches import Components

_ROUNDS = 60
"""Intervals of gradient times that are halved."""
MOST_STAGES = 12
"""Up to so many, every division of the chain into stretches is looked at."""
_TOLERANCE = 1e-9


def lower_bound_s(problem: PlacementProblem, known_s: float) -> float:
    """No placement takes less, nor is `known_s`, the cost of one that was found, passed.

    The best of the threshold bound and, where the devices are of few kinds, the bound over mixtures of kinds.
    """
    fixed = compute_bound_s(problem)
    found = max(threshold_bound_s(problem), mixture_bound_s(problem, known_s - fixed))
    return min(found + fixed, known_s)


def compute_bound_s(problem: PlacementProblem) -> float:
    """The computation is least where devices are sorted by speed: then every group has the slowest that is left."""
    slow_first = np.sort(problem.compute_s)[::-1]
    return float(slow_first[:: problem.task.replicas].sum())


def threshold_bound_s(problem: PlacementProblem) -> float:
    """Only the communication: Eq. 2 and Eq. 4 of DT-FM."""
    least_s = _least_sync_s(problem)
    if len(problem.kind_sizes) > MOST_KINDS:
        least_s = max(least_s, group_bound_s(problem))
    hops = LongHops(problem)
    # The sum falls in D: intervals are halved, the lowest first.
    most_s = least_s + hops.sum_s(least_s) - hops.sum_s(np.inf)
    heap = [(least_s + hops.sum_s(most_s), least_s, most_s)]
    for _ in range(_ROUNDS):
        lowest_s, low_s, high_s = heap[0]
        if lowest_s >= low_s + hops.sum_s(low_s) - _TOLERANCE:
            break
        middle_s = (low_s + high_s) / 2
        heapq.heapreplace(heap, (low_s + hops.sum_s(middle_s), low_s, middle_s))
        heapq.heappush(heap, (middle_s + hops.sum_s(high_s), middle_s, high_s))
    return heap[0][0]


def _least_sync_s(problem: PlacementProblem) -> float:
    """Every device stands in some group: even with its best partners the worst of them takes this."""
    everywhere, devices = np.zeros(len(problem.kind_sizes), dtype=np.int64), len(problem.kind)
    return float(_partners_s(problem, everywhere, np.array([devices])).max())


class LongHops:
    """How many hops must be longer than each threshold, for a time that gradients may take."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._times_s: Floats = np.unique(problem.hop_s[np.isfinite(problem.hop_s)])
        counted = len(problem.kind) <= MOST_DEVICES and problem.task.stages <= MOST_STAGES
        self._needed_s = cache(_counted(problem) if counted else _alike(problem))

    def sum_s(self, sync_s: float) -> float:
        """A bound on Eq. 4 with gradients in `sync_s`."""
        return sum(self._longest_s(k, sync_s) for k in range(self._problem.task.stages - 1))

    def _longest_s(self, k: int, sync_s: float) -> float:
        """t(k): bisection over the times that occur, the last of which is never too short."""
        shorter = self._times_s[:-1]
        first = bisect_left(shorter, True, key=lambda t: self._needed_s(float(t), k) <= sync_s + _TOLERANCE)
        return float(self._times_s[first])


def _counted(problem: PlacementProblem) -> Callable[[float, int], float]:
    """(threshold, long hops) -> the least time of gradients, by devices."""
    places = np.ix_(problem.kind, problem.kind)
    sync_s, hop_s = problem.sync_s[places], problem.hop_s[places]
    np.fill_diagonal(sync_s, 0.0)
    np.fill_diagonal(hop_s, np.inf)

    @cache
    def components(threshold_s: float) -> Components:
        return Components(hop_s <= threshold_s, sync_s, problem.task.stages, problem.task.replicas)

    return lambda threshold_s, long: components(threshold_s).needed_s(long)


def _alike(problem: PlacementProblem) -> Callable[[float, int], float]:
    """The same by kinds, weaker: some stretch of at least stages / (k + 1) groups is alike.

    Such a group holds no more of a component than its size over the stretch's length. Devices with no link up to the
    threshold make every hop they touch a long one.
    """
    stages, replicas, sizes = problem.task.stages, problem.task.replicas, problem.kind_sizes

    @cache
    def components(threshold_s: float) -> tuple[Ints, Ints, int]:
        near = problem.hop_s <= threshold_s
        labels = connected_components(near, directed=False)[1].astype(np.int64)
        alone = int(sizes[~near.any(axis=1)].sum())
        return labels, np.bincount(labels, weights=sizes).astype(np.int64), min(stages - 1, -(-alone // replicas))

    @cache
    def of_stretch(threshold_s: float, alike: int) -> float:
        labels, component_sizes, _ = components(threshold_s)
        cap = component_sizes // alike
        if cap.sum() < replicas or (alike == stages and (component_sizes % stages).any()):
            return np.inf
        times = _partners_s(problem, labels, cap)
        order = np.argsort(times)
        # So many devices stand in the stretch; the worst of them is no better than this quantile.
        return float(times[order[np.searchsorted(np.cumsum(sizes[order]), alike * replicas)]])

    def needed_s(threshold_s: float, long: int) -> float:
        return of_stretch(threshold_s, -(-stages // (long + 1))) if long >= components(threshold_s)[2] else np.inf

    return needed_s


def _partners_s(problem: PlacementProblem, labels: Ints, cap: Ints) -> Floats:
    """[kinds]: Eq. 2's sum over the cheapest partners, no more than `cap` [components] of each component in a group.

    The device itself counts for its own component. Infinite where its component may send nobody.
    """
    sync, sizes, partners = problem.sync_s, problem.kind_sizes, problem.task.replicas - 1
    kinds = len(sizes)
    found = np.zeros(kinds)
    for kind in range(kinds):
        order = np.argsort(sync[kind], kind="stable")
        available = sizes[order] - (order == kind)
        room = cap[labels[order]] - (labels[order] == labels[kind])
        if cap[labels[kind]] < 1:
            found[kind] = np.inf
            continue
        taken = _capped(available, room, labels[order], partners)
        found[kind] = float(taken @ sync[kind][order]) if taken.sum() == partners else np.inf
    return found


def _capped(available: Ints, room: Ints, labels: Ints, partners: int) -> Ints:
    """How many of each kind are taken, in the order given, within the room of its component and `partners` in all."""
    by_label = np.argsort(labels, kind="stable")
    running = np.cumsum(available[by_label]) - available[by_label]
    starts = np.searchsorted(labels[by_label], labels[by_label])
    before = np.empty(len(available), dtype=np.int64)
    before[by_label] = running - running[starts]
    within = np.clip(room - before, 0, available)
    return np.clip(partners - (np.cumsum(within) - within), 0, within)
