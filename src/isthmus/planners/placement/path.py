"""In which order the groups form the pipeline: the open-loop travelling salesman path of DT-FM's Eq. 4."""

from __future__ import annotations

from functools import cache

import numpy as np

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.search.local_search import nearest_tour, two_opt

EXACT_UP_TO = 10
"""Groups. Twelve would take ten times as long, and searches ask for thousands of paths."""


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
