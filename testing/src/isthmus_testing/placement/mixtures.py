"""The tighter lower bound where devices are of few kinds: the least D + hops over all gradient times D.

A mixture counts the devices of each kind in a group. With gradients in D seconds only some mixtures are allowed.

Groupings of few different mixtures are enumerated: multiplicities times mixtures add up to the devices, and the ways
are found by meeting in the middle, sums of one or two mixtures on either side.

For more of them, mixtures between which hops up to a threshold t are possible form classes. A pipeline that uses c
classes has at least c - 1 hops longer than t, and a class fills no more groups than its scarcest kinds allow; so a
small linear programme bounds c from below. Eq. 4 is at least the sum of the hops counted at each threshold.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse.csgraph import connected_components

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.highs import stdout_to_stderr
from isthmus.planners.placement.problem import PlacementProblem

MOST_KINDS = 10
_MOST_MIXTURES = 15_000
_FEW = 4  # different mixtures that are enumerated: two on either side
_MOST_SUMS, _MOST_WAYS = 4_000_000, 200_000
_LARGEST_KEY = 2.0**62
_ROUNDS = 80
_TOLERANCE = 1e-9


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
    while countable and count <= min(_FEW, tables.stages):
        reach = _reach_s(times, tables, count, best)
        if reach is None:
            return best
        try:
            best = min(best, tables.least_with(count, reach))
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


class TooManyWays(Exception):
    """The ways were not counted to the end."""


class _Level(NamedTuple):
    """Hops longer than one threshold."""

    width_s: float  # to the next threshold
    fewest: float  # classes that a pipeline needs
    apart: bool  # whether every mixture is a class of its own


class MixtureTables:
    """All mixtures of a problem, what their gradients take, and a bound on the pipeline for each time allowed."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.sizes, self.stages = problem.kind_sizes, problem.task.stages
        self._mixtures = mixtures(self.sizes, problem.task.replicas)
        exchanged = self._mixtures @ problem.sync_s - problem.sync_s.diagonal()
        self.sync_s: Floats = np.where(self._mixtures > 0, exchanged, 0.0).max(axis=1)  # [mixtures]: Eq. 2.
        self._hop_s = problem.hop_s
        self._thresholds: Floats = np.unique(self._hop_s[np.isfinite(self._hop_s)])
        self.least_pipeline_s = (self.stages - 1) * float(self._thresholds[0]) if self.stages > 1 else 0.0
        self._levels: dict[int, list[_Level]] = {}
        # [sets, kinds]: every set of kinds but the empty one.
        sets = np.arange(1, 1 << len(self.sizes))
        self._sets: Ints = (sets[:, None] >> np.arange(len(self.sizes))) & 1

    def least_with(self, count: int, sync_s: float) -> float:
        """A bound on Eq. 1 over all groupings of just `count` (1 to 4) different mixtures with gradients in `sync_s`;
        infinite where there is none.

        Hops between different mixtures hold a spanning tree of them; all others are no shorter than the least hop.
        Raises TooManyWays.
        """
        chosen = self.sync_s <= sync_s + _TOLERANCE
        allowed, best = self._mixtures[chosen], math.inf
        for parts in partitions(self.stages, count):
            ways = _ways(allowed, self.sizes, parts)
            total = self.sync_s[chosen][ways].max(axis=1) + self._tree_s(allowed, ways)
            best = min(best, float(total.min(initial=np.inf)))
        return best + (self.stages - count) * float(self._thresholds[0])

    def _tree_s(self, allowed: Ints, ways: Ints) -> Floats:
        """[ways]: length of a minimum spanning tree over the mixtures of each way, as the least over all trees."""
        count = ways.shape[1]
        if count == 1:
            return np.zeros(len(ways))
        pairs = list(itertools.combinations(range(count), 2))
        ends = np.sort(np.concatenate([ways[:, pair] for pair in pairs]), axis=1)
        different, place = np.unique(ends, axis=0, return_inverse=True)
        lengths = self._hops_s(allowed, different)[place.reshape(len(pairs), len(ways))]
        chosen = itertools.combinations(range(len(pairs)), count - 1)
        trees = [list(edges) for edges in chosen if nx.is_tree(nx.Graph([pairs[k] for k in edges]))]
        return np.min([lengths[tree].sum(axis=0) for tree in trees], axis=0)

    def _hops_s(self, allowed: Ints, pairs: Ints) -> Floats:
        """[pairs] Eq. 3 of [pairs, 2] numbers of mixtures; for a mixture and itself the least hop of all.

        Hall: all pairs of a perfect matching can be near unless some set of kinds outnumbers its neighbours.
        """
        of_sets = (allowed @ self._sets.T).astype(np.int16)
        found = np.full(len(pairs), np.inf)
        for threshold in self._thresholds[::-1].tolist():
            neighbours = (self._sets @ (self._hop_s <= threshold)) > 0
            reached = (allowed @ neighbours.T).astype(np.int16)
            found[(of_sets[pairs[:, 0]] <= reached[pairs[:, 1]]).all(axis=1)] = threshold
        return np.where(pairs[:, 0] == pairs[:, 1], self._thresholds[0], found)

    def pipeline_s(self, sync_s: float, at_least: int = 1) -> float:
        """The least of Eq. 4 with gradients in `sync_s` and `at_least` so many different mixtures; infinite if none."""
        allowed = self.sync_s <= sync_s + _TOLERANCE
        count = int(allowed.sum())
        if count not in self._levels:
            self._levels[count] = self._levels_of(self._mixtures[allowed])
        total = self.least_pipeline_s
        for level in self._levels[count]:
            # Where every mixture is a class of its own, so many mixtures are so many classes.
            fewest = max(level.fewest, at_least) if level.apart else level.fewest
            total += (min(fewest, self.stages) - 1) * level.width_s
        return total

    def _levels_of(self, allowed: Ints) -> list[_Level]:
        levels: list[_Level] = []
        solved: dict[bytes, float] = {}
        for threshold, following in itertools.pairwise(self._thresholds.tolist()):
            classes = _classes(allowed, self._hop_s <= threshold)
            key = classes.tobytes()
            if key not in solved:
                solved[key] = self._fewest_classes(allowed, classes)
            if math.isinf(solved[key]):
                return [_Level(math.inf, 2, False)]
            apart = int(classes.max()) + 1 + int((classes < 0).sum()) == len(allowed)
            levels.append(_Level(following - threshold, solved[key], apart))
            if not classes.any():
                break
        return levels

    def _fewest_classes(self, allowed: Ints, classes: Ints) -> float:
        """A linear programme: each mixture that is used takes its share of its class, and all devices are used."""
        of_sets = allowed @ self._sets.T
        most = np.ones(len(allowed))
        held = np.full((int(classes.max()) + 1, of_sets.shape[1]), np.iinfo(np.int64).max)
        together = classes >= 0
        np.minimum.at(held, classes[together], of_sets[together])
        available = self._sets @ self.sizes
        fill = np.where(held > 0, available // np.maximum(held, 1), self.stages).min(axis=1, initial=self.stages)
        most[together] = np.maximum(fill[classes[together]], 1)
        with stdout_to_stderr():
            solved = linprog(1.0 / most, A_eq=allowed.T, b_eq=self.sizes, method="highs")
        if solved.status == 2:
            return math.inf
        return float(math.ceil(solved.fun - 1e-6)) if solved.status == 0 else 1.0


def _classes(allowed: Ints, near: NDArray[np.bool_]) -> Ints:
    """[allowed]: mixtures with different labels are not joined by near hops, directly or by others: they have other
    numbers of devices in the components of the kinds' graph.

    A mixture with a device that is near to none has a negative label: each group of it stands alone.
    """
    count, component = connected_components(near, directed=False)
    totals = np.zeros((len(allowed), count), dtype=np.int64)
    np.add.at(totals.T, component, allowed.T)
    together = allowed[:, ~near.any(axis=1)].sum(axis=1) == 0
    labels = np.full(len(allowed), -1, dtype=np.int64)
    labels[together] = np.unique(totals[together], axis=0, return_inverse=True)[1].reshape(-1)
    return labels


def count_mixtures(sizes: Ints, members: int) -> int:
    """Return how many different groups of `members` devices there are, by kind."""
    ways = [1, *([0] * members)]
    for size in sizes.tolist():
        ways = [sum(ways[max(0, m - size) : m + 1]) for m in range(members + 1)]
    return ways[members]


def mixtures(sizes: Ints, members: int) -> Ints:
    """[mixtures, kinds]: all of them."""
    partial = np.zeros((1, 0), dtype=np.int64)
    for kind, size in enumerate(sizes.tolist()):
        rest = int(sizes[kind + 1 :].sum())
        grown = [np.column_stack((partial, np.full(len(partial), count))) for count in range(min(size, members) + 1)]
        partial = np.concatenate(grown)
        left = members - partial.sum(axis=1)
        partial = partial[(left >= 0) & (left <= rest)]
    return partial


def partitions(total: int, count: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """`total` as a sum of `count` positive numbers, descending."""
    most = total if most is None else most
    if count == 0:
        if total == 0:
            yield ()
        return
    for first in range(min(most, total - count + 1), 0, -1):
        for rest in partitions(total - first, count - 1, first):
            yield (first, *rest)


def _ways(mixtures: Ints, sizes: Ints, parts: tuple[int, ...]) -> Ints:
    """[ways, parts]: mixtures that, each as often as its part says, use all devices."""
    # Devices per kind as one number.
    radix = np.cumprod([1, *(sizes[:-1] + 1).tolist()])
    starts, ends = _sums(mixtures, sizes, parts[: len(parts) // 2]), _sums(mixtures, sizes, parts[len(parts) // 2 :])
    wanted = int(radix @ sizes) - starts.devices @ radix
    keys = ends.devices @ radix
    order = np.argsort(keys, kind="stable")
    low, high = np.searchsorted(keys, wanted, sorter=order), np.searchsorted(keys, wanted, "right", order)
    if int((high - low).sum()) > _MOST_WAYS:
        raise TooManyWays
    met = np.repeat(np.arange(len(wanted)), high - low)
    offset = np.arange(len(met)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    return np.concatenate((starts.members[met], ends.members[order[low[met] + offset]]), axis=1)


class _Sums(NamedTuple):
    devices: Ints  # [sums, kinds]
    members: Ints  # [sums, parts]: mixtures that were added


def _sums(mixtures: Ints, sizes: Ints, parts: tuple[int, ...]) -> _Sums:
    """Sums of mixtures, each times its part, that no kind is too small for."""
    devices, members = np.zeros((1, len(sizes)), dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
    for part in parts:
        fitting = np.flatnonzero((part * mixtures <= sizes).all(axis=1))
        others = part * mixtures[fitting]
        if len(devices) * len(others) > _MOST_SUMS:
            raise TooManyWays
        fits = [np.flatnonzero((one + others <= sizes).all(axis=1)) for one in devices]
        first = np.repeat(np.arange(len(fits)), [len(found) for found in fits])
        second = np.concatenate([np.zeros(0, dtype=np.int64), *fits])
        devices, members = devices[first] + others[second], np.column_stack((members[first], fitting[second]))
    return _Sums(devices, members)
