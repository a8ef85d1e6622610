"""A lower bound on what any placement costs.

Gradients take D at least as long as in the best group that each device can be in. Of the pipeline, let t(k) be the
least threshold such that all hops but k can be up to it. The longest hop takes at least t(0), the second longest at
least t(1), and so on:

    total  >=  min over D of  D + sum over k of t(k, D)

With k hops longer than t, the groups between them are joined by links up to t, and few ways to divide the devices are
left: links up to the threshold form components. The k long hops cut the chain of groups into k + 1 stretches, and
through a stretch of l groups run `replicas` paths of l devices, each inside one component. So a component of n devices
holds

    n = sum over stretches i of  l_i * n_i        with  sum over components of n_i = replicas  for each stretch

paths. It needs at least so many paths as its links allow, and a group in which n_i of its devices meet must have fast
gradients. All lengths of stretches are tried; a set of reachable (n_1, n_2, ..) is one integer, a bit each.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_flow

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.placement.problem import PlacementProblem
from isthmus_testing.placement.mixtures import MOST_KINDS, mixture_bound_s, partitions

_ROUNDS = 60  # intervals of gradient times that are halved
MOST_DEVICES, MOST_STAGES = 256, 12  # up to so many, every division of the chain into stretches is looked at
_TOLERANCE = 1e-9
_NODES = 4_000  # nodes of one device's search of its best group
_SEARCHED = 16  # devices, those with the slowest best partners first


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
    order = np.argsort(problem.sync_s, axis=1, kind="stable")
    available = problem.kind_sizes[order] - (order == np.arange(len(order))[:, None])
    taken = np.clip(problem.task.replicas - 1 - (np.cumsum(available, axis=1) - available), 0, available)
    return float((taken * np.take_along_axis(problem.sync_s, order, axis=1)).sum(axis=1).max())


class LongHops:
    """How many hops must be longer than each threshold, for a time that gradients may take."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._stages, self._replicas = problem.task.stages, problem.task.replicas
        self._times_s: Floats = np.unique(problem.hop_s[np.isfinite(problem.hop_s)])
        self._counted = len(problem.kind) <= MOST_DEVICES and self._stages <= MOST_STAGES
        if self._counted:
            self._sync_s, self._hop_s = problem.between_devices()
        self._components, self._needed_s = cache(self._components_of), cache(self._least_s)

    def sum_s(self, sync_s: float) -> float:
        """A bound on Eq. 4 with gradients in `sync_s`."""
        if not self._counted:  # no hop is shorter than the shortest
            return (self._stages - 1) * float(self._times_s[0])
        return sum(self._longest_s(k, sync_s) for k in range(self._stages - 1))

    def _longest_s(self, k: int, sync_s: float) -> float:
        """t(k): bisection over the times that occur, the last of which is never too short."""
        shorter = self._times_s[:-1]
        first = bisect_left(shorter, True, key=lambda t: self._needed_s(float(t), k) <= sync_s + _TOLERANCE)
        return float(self._times_s[first])

    def _least_s(self, threshold_s: float, long: int) -> float:
        """The least time of gradients with so many hops longer than that; infinite where there must be more."""
        components = self._components(threshold_s)
        times = np.append(0.0, np.unique([component.together_s for component in components]))
        lengths = [Counter(length) for length in partitions(self._stages, long + 1)]

        def possible(time_s: float) -> bool:
            return any(_fits(length, components, self._replicas, time_s) for length in lengths)

        first = bisect_left(times, True, key=possible)
        return float(times[first]) if first < len(times) else np.inf

    def _components_of(self, threshold_s: float) -> list[_Component]:
        """Return the components of the links up to the threshold, the largest first."""
        near = self._hop_s <= threshold_s
        count, labels = connected_components(near, directed=False)
        sizes = np.bincount(labels)
        links = np.bincount(labels, weights=_joined(near)).astype(np.int64) // 2
        paths = np.maximum(sizes - links, -(-sizes // self._stages))
        together = [_together_s(self._sync_s, labels == label, self._replicas) for label in range(count)]
        return sorted(map(_Component, sizes.tolist(), paths.tolist(), together), key=lambda c: -c.devices)


class _Component(NamedTuple):
    devices: int
    paths: int  # at least so many
    together_s: Floats  # [replicas]: gradients of a group with more than 0, 1, .. of its devices at least.


def _joined(near: NDArray[np.bool_]) -> Floats:
    """[devices]: ends of links at each, where links are most and no device has more than two; by a flow that may
    count halves of links."""
    devices = len(near)
    source, target, every = 2 * devices, 2 * devices + 1, np.arange(devices)
    a, b = np.nonzero(near)
    tails = np.concatenate((np.full(devices, source), a, every + devices))
    heads = np.concatenate((every, b + devices, np.full(devices, target)))
    room = np.concatenate((np.full(devices, 2), np.ones(len(a)), np.full(devices, 2))).astype(np.int32)
    graph = csr_array((room, (tails, heads)), shape=(target + 1, target + 1))
    return maximum_flow(graph, source, target).flow[[source]].toarray()[0, :devices].astype(np.float64)


def _together_s(sync_s: Floats, inside: NDArray[np.bool_], replicas: int) -> Floats:
    """[replicas]: the slowest device's exchange with its best partners, of which 0, 1, .. are of its component."""
    own = np.sort(sync_s[np.ix_(inside, inside)], axis=1)[:, :replicas]
    others = np.sort(sync_s[np.ix_(inside, ~inside)], axis=1)[:, : replicas - 1]
    exchanged = np.full((len(own), replicas), np.inf)
    for mates in range(own.shape[1]):
        if replicas - 1 - mates <= others.shape[1]:
            exchanged[:, mates] = own[:, : mates + 1].sum(axis=1) + others[:, : replicas - 1 - mates].sum(axis=1)
    return np.minimum.accumulate(exchanged, axis=1).max(axis=0)


def _fits(lengths: Counter[int], components: list[_Component], replicas: int, sync_s: float) -> bool:
    """Return whether the components fill the stretches; stretches of one length are counted together."""
    room = {length: replicas * times for length, times in lengths.items()}
    place, bits = dict[int, int](), 1
    for length, most in room.items():
        place[length], bits = bits, bits * (most + 1)
    reached, all_bits = 1, (1 << bits) - 1
    for component in components:
        after, together = 0, 1 + int((component.together_s > sync_s).sum())
        for paths in _ways(component.devices, tuple(room.items())):
            if sum(paths) >= component.paths and min(max(paths), replicas) >= together:
                after |= reached << sum(n * bit for n, bit in zip(paths, place.values(), strict=True))
        # A sum that is too large for its place runs into the next one: more seems possible, never less.
        reached = after & all_bits
    return bool(reached >> (bits - 1))


@cache
def _ways(devices: int, room: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Numbers of paths of each (length, at most so many) that hold so many devices."""
    return tuple(_split(devices, room))


def _split(devices: int, room: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, ...]]:
    (length, most), rest = room[0], room[1:]
    if not rest:
        if devices % length == 0 and devices // length <= most:
            yield (devices // length,)
        return
    for paths in range(min(most, devices // length) + 1):
        for others in _split(devices - paths * length, rest):
            yield (paths, *others)


def group_bound_s(problem: PlacementProblem) -> float:
    """No placement has faster gradients (DT-FM Eq. 2). 0 above 256 devices.

    A device cannot choose its partners alone: they exchange shards with each other, and the slowest of them counts.

        max over groups of sync(C)  >=  max over devices d of  min over groups C with d of sync(C)
    """
    replicas = problem.task.replicas
    if len(problem.kind) > MOST_DEVICES or replicas == 1:
        return 0.0
    sync_s, _ = problem.between_devices()
    alone_s = np.sort(sync_s, axis=1)[:, 1:replicas].sum(axis=1)
    bound_s = 0.0
    for device in np.argsort(-alone_s, kind="stable")[:_SEARCHED].tolist():
        bound_s = max(bound_s, least_group_s(sync_s, device, replicas, known_s=bound_s))
    return bound_s


class _Node(NamedTuple):
    bound_s: float
    missing: int  # the missing members: of two nodes with one bound the fuller group comes first
    number: int
    group: tuple[int, ...]
    candidates: Ints


def least_group_s(sync_s: Floats, device: int, size: int, *, known_s: float = 0.0, nodes: int = _NODES) -> float:
    """A lower bound on sync(C) of every group C of `size` with the device, and no less than `known_s`.

    Best-first branch and bound over groups that are filled one by one. With r members missing, a member e of the group,
    or a candidate f for it, exchanges at least

        its links into the group  +  its r (of f: r - 1) fastest links to candidates.

    `sync_s` [devices, devices] has a diagonal of 0. Exact unless the search is cut off after so many nodes: the lowest
    bound that is still open holds then.
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
