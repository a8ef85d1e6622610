"""Whether all hops but k can be up to a threshold, by counting devices.

Links up to the threshold form components. The k long hops cut the chain of groups into k + 1 stretches, and through a
stretch of l groups run `replicas` paths of l devices, each inside one component. So a component of n devices holds

    n = sum over stretches i of  l_i * n_i        with  sum over components of n_i = replicas  for each stretch

paths. It needs at least so many paths as its links allow, and a group in which n_i of its devices meet must have fast
gradients. All lengths of stretches are tried; a set of reachable (n_1, n_2, ..) is one integer, a bit each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_flow

from isthmus.cost.network import Floats
from isthmus.planners.placement.few_mixtures import partitions


class Component(NamedTuple):
    devices: int
    paths: int
    """At least so many."""
    together: int
    """In some group there are at least so many of its devices."""


class Components:
    """Those of the links `near` [devices, devices]; `sync_s` [devices, devices] has a diagonal of 0."""

    def __init__(self, near: NDArray[np.bool_], sync_s: Floats, stages: int, replicas: int) -> None:
        self._stages, self._replicas = stages, replicas
        count, labels = connected_components(near, directed=False)
        self._sizes = np.bincount(labels)
        links = np.bincount(labels, weights=_joined(near)).astype(np.int64) // 2
        self._paths = np.maximum(self._sizes - links, -(-self._sizes // stages))
        self._sync_s = np.array([_together_s(sync_s, labels == label, replicas) for label in range(count)])

    def needed_s(self, long: int) -> float:
        """The least time of gradients with so many long hops; infinite where there must be more."""
        times = np.append(0.0, np.unique(self._sync_s))
        first = bisect_left(times, True, key=lambda time_s: self._possible(long, float(time_s)))
        return float(times[first]) if first < len(times) else np.inf

    def _possible(self, long: int, sync_s: float) -> bool:
        together = 1 + (self._sync_s > sync_s).sum(axis=1)
        found = map(Component, self._sizes.tolist(), self._paths.tolist(), together.tolist())
        largest_first = sorted(found, reverse=True)
        lengths = partitions(self._stages, long + 1)
        return any(_fits(Counter(length), largest_first, self._replicas) for length in lengths)


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


def _fits(lengths: Counter[int], components: list[Component], replicas: int) -> bool:
    """Whether the components fill the stretches; stretches of one length are counted together."""
    room = {length: replicas * times for length, times in lengths.items()}
    place, bits = dict[int, int](), 1
    for length, most in room.items():
        place[length], bits = bits, bits * (most + 1)
    reached, all_bits = 1, (1 << bits) - 1
    for component in components:
        after = 0
        for paths in _ways(component.devices, tuple(room.items())):
            if sum(paths) >= component.paths and min(max(paths), replicas) >= component.together:
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
