"""A placement and what it costs, evaluated exactly as DT-FM defines it (Eq. 1-4); and random ones, its baseline."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from isthmus.cost.kernel import Floats, Ints
from isthmus.errors import UserError
from isthmus.planners.placement.problem import PlacementProblem
from isthmus.planners.search.local_search import nearest_tour, two_opt

Group = tuple[int, ...]
"""The sorted kinds of its members. Where links depend only on region that is a count of devices per region, and few
different groups exist; where every device is a kind of its own it is a set of devices."""

_MOST_KEPT = 400_000
_SMALL = 32  # up to so many rows, building scipy's sparse matrix costs more than the matching
_BITS = 1 << np.arange(_SMALL, dtype=np.int64)
EXACT_UP_TO = 10  # groups. Twelve would take ten times as long, and searches ask for thousands of paths.


class Landscape:
    """Costs of groups over `kinds`, whose links are [kinds, kinds] matrices of seconds (see `PlacementProblem`).

    Kept once computed: searches meet the same groups again and again."""

    def __init__(self, sync_s: Floats, hop_s: Floats) -> None:
        def slowest_s(group: Group) -> float:
            links = sync_s[np.ix_(group, group)]
            return float((links.sum(axis=1) - links.diagonal()).max())

        def pair_s(a: Group, b: Group) -> float:
            return bottleneck_matching(hop_s[np.ix_(a, b)])[0]

        self._group_s, self._pair_s = lru_cache(_MOST_KEPT)(slowest_s), lru_cache(_MOST_KEPT)(pair_s)

    def group_s(self, group: Group) -> float:
        """DT-FM Eq. 2: the slowest member's exchange of shards with all others of the group."""
        return self._group_s(group)

    def hop_s(self, a: Group, b: Group) -> float:
        """DT-FM Eq. 3: the slowest pair of the best perfect matching between two groups."""
        return self._pair_s(a, b) if a <= b else self._pair_s(b, a)

    def between(self, groups: list[Group]) -> Floats:
        """[groups, groups]: DT-FM's coarsened graph (Fig. 2c); 0 on the diagonal."""
        cost = np.zeros((len(groups), len(groups)))
        for i, a in enumerate(groups):
            for j in range(i):
                cost[i, j] = cost[j, i] = self.hop_s(a, groups[j])
        return cost


@dataclass(frozen=True, kw_only=True, eq=False)
class StageGrouping:
    """Which device runs which stage of which replica, and the seconds that this takes: `data_parallel_s` is Eq. 2's
    maximum over groups, `pipeline_s` Eq. 4's path."""

    devices: Ints  # [stages, replicas]: row s is the data-parallel group of stage s, column r the pipeline of replica r
    data_parallel_s: float
    pipeline_s: float

    @property
    def total_s(self) -> float:
        """DT-FM Eq. 1."""
        return self.data_parallel_s + self.pipeline_s


def evaluate(problem: PlacementProblem, groups: Ints, landscape: Landscape | None = None) -> StageGrouping:
    """The grouping made of these data-parallel groups, [stages, replicas] device numbers in any order.

    Chooses the order of groups (exact up to ten, see `path`) and who hands over to whom. A landscape made by
    `landscape_of(problem)` saves work over many calls. Raises UserError unless each device stands in one group.
    """
    stages, replicas = problem.task.stages, problem.task.replicas
    if groups.shape != (stages, replicas) or not np.array_equal(np.sort(groups, axis=None), np.arange(groups.size)):
        raise UserError(
            f"placement: groups: got shape {groups.shape}, expected {stages} groups of {replicas} with each device once"
        )
    landscape = landscape or landscape_of(problem)
    kinds = [kinds_of(problem, row) for row in groups]
    between = landscape.between(kinds)
    order = open_path(between)
    return StageGrouping(
        devices=_joined(problem, groups[order]),
        data_parallel_s=max(landscape.group_s(group) for group in kinds),
        pipeline_s=path_length_s(between, order),
    )


def landscape_of(problem: PlacementProblem) -> Landscape:
    return Landscape(problem.sync_s, problem.hop_s)


def kinds_of(problem: PlacementProblem, devices: Ints) -> Group:
    return tuple(int(kind) for kind in np.sort(problem.kind[devices]))


def _joined(problem: PlacementProblem, ordered: Ints) -> Ints:
    """Each row sorted so that a column is one pipeline, following the bottleneck matching of neighbours."""
    joined = [ordered[0]]
    for row in ordered[1:]:
        _, columns = bottleneck_matching(problem.hop_s[np.ix_(problem.kind[joined[-1]], problem.kind[row])])
        joined.append(row[columns])
    return np.array(joined)


def random_groups(problem: PlacementProblem, *, seed: int = 0, draws: int = 1) -> StageGrouping:
    """The cheapest of `draws` random balanced groupings, each with its best order and matching."""
    rng, landscape = np.random.default_rng(seed), landscape_of(problem)
    found = (evaluate(problem, shuffled(problem, rng), landscape) for _ in range(max(1, draws)))
    return min(found, key=lambda grouping: grouping.total_s)


def shuffled(problem: PlacementProblem, rng: np.random.Generator) -> Ints:
    """[stages, replicas] device numbers in random order."""
    return rng.permutation(len(problem.kind)).reshape(problem.task.stages, problem.task.replicas)


def bottleneck_matching(cost: Floats) -> tuple[float, list[int]]:
    """The least t such that the pairs up to t hold a perfect matching, and for each row the column that it is matched
    with (DT-FM Eq. 3; supplement: polynomial). `cost` is [n, n], in seconds.

    Bisection over the values that occur, from the dearest cheapest pair of any row or column upward.
    """
    floor = max(float(cost.min(axis=1).max()), float(cost.min(axis=0).max()))
    found = _perfect(cost <= floor)
    if found is not None:  # the usual case: worth a try before sorting
        return floor, found
    values = np.unique(cost[cost > floor])
    least = values[bisect_left(values[:-1], True, key=lambda value: _perfect(cost <= value) is not None)]
    found = _perfect(cost <= least)
    assert found is not None, "up to the dearest pair all are allowed"
    return float(least), found


def _perfect(allowed: NDArray[np.bool_]) -> list[int] | None:
    """A perfect matching of the allowed pairs as a column per row, or None."""
    if len(allowed) > _SMALL:
        matched = maximum_bipartite_matching(csr_array(allowed), perm_type="column")
        return None if (matched < 0).any() else [int(column) for column in matched]
    rows = (allowed @ _BITS[: len(allowed)]).tolist()
    owner: dict[int, int] = {}
    for row in range(len(rows)):
        if not _augment(rows, row, owner, [0]):
            return None
    columns = [0] * len(rows)
    for bit, row in owner.items():
        columns[row] = bit.bit_length() - 1
    return columns


def _augment(rows: list[int], row: int, owner: dict[int, int], seen: list[int]) -> bool:
    """Kuhn's augmenting path from `row`. Columns are single bits; `seen` holds one mask."""
    free = rows[row] & ~seen[0]
    while free:
        bit = free & -free
        seen[0] |= bit
        if bit not in owner or _augment(rows, owner[bit], owner, seen):
            owner[bit] = row
            return True
        free = rows[row] & ~seen[0]
    return False


def open_path(cost: Floats) -> list[int]:
    """A short path through all nodes of a symmetric [n, n] matrix of seconds: exact up to ten nodes, 2-opt beyond."""
    nodes = len(cost)
    if nodes == 1:
        return [0]
    if nodes <= EXACT_UP_TO:
        return _held_karp(cost)
    starts = np.unique(np.linspace(0, nodes - 1, 8).astype(np.int64))
    orders = [two_opt(cost, nearest_tour(cost, int(start), range(nodes)), [(0, nodes)]) for start in starts]
    return min(orders, key=lambda order: path_length_s(cost, order))


def path_length_s(cost: Floats, order: list[int]) -> float:
    return float(cost[order[:-1], order[1:]].sum())


def _held_karp(cost: Floats) -> list[int]:
    """Held and Karp's dynamic programme: the shortest path over each set of nodes, for each last node."""
    nodes = len(cost)
    least = np.full((1 << nodes, nodes), np.inf)
    before = np.zeros((1 << nodes, nodes), dtype=np.int64)
    least[1 << np.arange(nodes), np.arange(nodes)] = 0.0
    for sets, rows, added in _layers(nodes):
        lengths = least[sets][:, :, None] + cost[None]
        via = lengths.argmin(axis=1)
        target = sets[rows] | (1 << added)
        least[target, added] = lengths.min(axis=1)[rows, added]
        before[target, added] = via[rows, added]
    last, visited = int(least[-1].argmin()), (1 << nodes) - 1
    order = [last]
    while len(order) < nodes:
        last, visited = int(before[visited, last]), visited ^ (1 << last)
        order.append(last)
    return order


@cache
def _layers(nodes: int) -> list[tuple[Ints, Ints, Ints]]:
    """For each size below `nodes`: the sets of that size as bit masks, and pairs (row of a set, node outside it)."""
    masks = np.arange(1 << nodes, dtype=np.int64)
    inside = (masks[:, None] >> np.arange(nodes)) & 1
    layers: list[tuple[Ints, Ints, Ints]] = []
    for size in range(1, nodes):
        rows = np.flatnonzero(inside.sum(axis=1) == size)
        outside = np.nonzero(inside[rows] == 0)
        layers.append((masks[rows], outside[0].astype(np.int64), outside[1].astype(np.int64)))
    return layers
