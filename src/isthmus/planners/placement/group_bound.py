"""A lower bound on gradients where every link differs: the best group that each device can be in.

A device cannot choose its partners alone: they exchange shards with each other, and the slowest of them counts.

    max over groups of sync(C)  >=  max over devices d of  min over groups C with d of sync(C)

The minimum is found by best-first branch and bound over groups that are filled one by one. With r members missing, a
member e of the group, or a candidate f for it, exchanges at least

    its links into the group  +  its r (of f: r - 1) fastest links to candidates.

Searches are cut off after some nodes: the lowest bound that is still open holds then.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.placement.problem import PlacementProblem

MOST_DEVICES = 256
_NODES = 4_000
"""Of one device's search."""
_SEARCHED = 16
"""Devices, those with the slowest best partners first."""


def group_bound_s(problem: PlacementProblem) -> float:
    """No placement has faster gradients (DT-FM Eq. 2). 0 above 256 devices."""
    replicas = problem.task.replicas
    if len(problem.kind) > MOST_DEVICES or replicas == 1:
        return 0.0
    sync_s = problem.sync_s[np.ix_(problem.kind, problem.kind)]
    np.fill_diagonal(sync_s, 0.0)
    alone_s = np.sort(sync_s, axis=1)[:, 1:replicas].sum(axis=1)
    bound_s = 0.0
    for device in np.argsort(-alone_s, kind="stable")[:_SEARCHED].tolist():
        bound_s = max(bound_s, least_group_s(sync_s, device, replicas, known_s=bound_s))
    return bound_s


class _Node(NamedTuple):
    bound_s: float
    missing: int
    """Of two nodes with one bound the fuller group comes first."""
    number: int
    group: tuple[int, ...]
    candidates: Ints


def least_group_s(sync_s: Floats, device: int, size: int, *, known_s: float = 0.0, nodes: int = _NODES) -> float:
    """A lower bound on sync(C) of every group C of `size` with the device, and no less than `known_s`.

    `sync_s` [devices, devices] has a diagonal of 0. Exact unless the search is cut off after so many nodes.
    """
    everyone = np.delete(np.arange(len(sync_s)), device)
    number = itertools.count()
    heap = [_Node(known_s, size - 1, next(number), (device,), everyone)]
    while True:
        node = heapq.heappop(heap)
        if not node.missing or not nodes:
            return node.bound_s
        nodes -= 1
        with_each = _with_each(sync_s, node)
        order = np.argsort(with_each, kind="stable")
        nearest, others = int(node.candidates[order[0]]), node.candidates[order[1:]]
        # All missing members come from the candidates, so the group costs no less than the last of the best of them.
        joined = max(node.bound_s, float(with_each[order[node.missing - 1]]))
        heapq.heappush(heap, _Node(joined, node.missing - 1, next(number), (*node.group, nearest), others))
        if len(others) >= node.missing:
            left = max(node.bound_s, float(with_each[order[node.missing]]))
            heapq.heappush(heap, _Node(left, node.missing, next(number), node.group, others))


def _with_each(sync_s: Floats, node: _Node) -> Floats:
    """[candidates]: a bound on the group's gradients if this candidate joins."""
    group, candidates, more = np.array(node.group), node.candidates, node.missing - 1
    among = sync_s[np.ix_(candidates, candidates)]
    np.fill_diagonal(among, np.inf)
    joining = sync_s[np.ix_(group, candidates)]
    inside = sync_s[np.ix_(group, group)].sum(axis=1)
    of_candidates = joining.sum(axis=0) + _fastest(among, more).sum(axis=1)
    # A member's link to the candidate, and its fastest to others: the candidate is not counted twice.
    fastest = _fastest(joining, more + 1)
    with_it = joining <= fastest[:, -1:]
    of_members = np.where(with_it, fastest.sum(axis=1)[:, None], joining + fastest[:, :-1].sum(axis=1)[:, None])
    return np.maximum(of_candidates, (inside[:, None] + of_members).max(axis=0))


def _fastest(links_s: Floats, count: int) -> Floats:
    """[rows, count]: the least of each row, ascending."""
    return np.sort(links_s, axis=1)[:, :count]
