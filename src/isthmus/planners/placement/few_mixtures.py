"""Every way to use few different mixtures of kinds, so that a bound for many of them closes the case.

Multiplicities times mixtures add up to the devices. The ways are found by meeting in the middle: sums of one or two
mixtures on either side, joined where they complement each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from isthmus.cost.kernel import Floats, Ints

MOST = 4
"""Different mixtures: two on either side."""
_MOST_SUMS, _MOST_WAYS = 4_000_000, 200_000


class Allowed(NamedTuple):
    mixtures: Ints
    """[mixtures, kinds]: devices of each kind in a group."""
    sync_s: Floats
    """[mixtures]: Eq. 2."""
    hops_s: Callable[[Ints], Floats]
    """[pairs, 2] numbers of mixtures -> [pairs] Eq. 3; for a mixture and itself the least hop of all."""
    least_hop_s: float


class _MixtureSums(NamedTuple):
    keys: Ints
    """[sums]: the summed devices per kind as one number."""
    members: Ints
    """[sums, 1 or 2]: mixtures that were added."""


class TooManyWays(Exception):
    """The ways were not counted to the end."""


def least_with(count: int, allowed: Allowed, sizes: Ints, stages: int) -> float:
    """A bound on Eq. 1 over all groupings of just `count` (1 to 4) different mixtures; infinite where there is none.

    Hops between different mixtures hold a spanning tree of them; all others are no shorter than the least hop.
    Raises TooManyWays.
    """
    best = math.inf
    for parts in partitions(stages, count):
        for ways in _ways(allowed.mixtures, sizes, parts):
            total = allowed.sync_s[ways].max(axis=1) + _tree_s(allowed, ways)
            best = min(best, float(total.min(initial=np.inf)))
    return best + (stages - count) * allowed.least_hop_s


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


def _ways(mixtures: Ints, sizes: Ints, parts: tuple[int, ...]) -> Iterator[Ints]:
    """[ways, parts]: mixtures that, each as often as its part says, use all devices."""
    radix = np.cumprod([1, *(sizes[:-1] + 1).tolist()])
    left, right = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    ends = _sums(mixtures, sizes, right, radix)
    order = np.argsort(ends.keys, kind="stable")
    keys, members = ends.keys[order], ends.members[order]
    starts = (
        _sums(mixtures, sizes, left, radix) if left else _MixtureSums(np.zeros(1, np.int64), np.zeros((1, 0), np.int64))
    )
    wanted = int(radix @ sizes) - starts.keys
    low, high = np.searchsorted(keys, wanted), np.searchsorted(keys, wanted, side="right")
    if int((high - low).sum()) > _MOST_WAYS:
        raise TooManyWays
    met = np.repeat(np.arange(len(wanted)), high - low)
    offset = np.arange(len(met)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    yield np.concatenate((starts.members[met], members[low[met] + offset]), axis=1)


def _sums(mixtures: Ints, sizes: Ints, parts: tuple[int, ...], radix: Ints) -> _MixtureSums:
    """Sums of one or two mixtures, times their parts, that no kind is too small for."""
    fitting = [np.flatnonzero((part * mixtures <= sizes).all(axis=1)) for part in parts]
    if len(parts) == 1:
        return _MixtureSums(parts[0] * mixtures[fitting[0]] @ radix, fitting[0][:, None])
    if len(fitting[0]) * len(fitting[1]) > _MOST_SUMS:
        raise TooManyWays
    keys: list[Ints] = []
    members: list[Ints] = []
    others = parts[1] * mixtures[fitting[1]]
    for first in fitting[0].tolist():
        summed = parts[0] * mixtures[first] + others
        fits = np.flatnonzero((summed <= sizes).all(axis=1))
        keys.append(summed[fits] @ radix)
        members.append(np.column_stack((np.full(len(fits), first), fitting[1][fits])))
    if not keys:
        return _MixtureSums(np.zeros(0, np.int64), np.zeros((0, 2), np.int64))
    return _MixtureSums(np.concatenate(keys), np.concatenate(members))


def _tree_s(allowed: Allowed, ways: Ints) -> Floats:
    """[ways]: length of a minimum spanning tree over the mixtures of each way, as the least over all trees."""
    count = ways.shape[1]
    if count == 1:
        return np.zeros(len(ways))
    pairs = list(itertools.combinations(range(count), 2))
    ends = np.sort(np.concatenate([ways[:, pair] for pair in pairs]), axis=1)
    different, place = np.unique(ends, axis=0, return_inverse=True)
    lengths = allowed.hops_s(different)[place.reshape(len(pairs), len(ways))]
    trees = [
        tree for tree in itertools.combinations(range(len(pairs)), count - 1) if _spans([pairs[k] for k in tree], count)
    ]
    return np.min([lengths[list(tree)].sum(axis=0) for tree in trees], axis=0)


def _spans(pairs: list[tuple[int, int]], count: int) -> bool:
    label = list(range(count))
    for a, b in pairs:
        old, new = label[a], label[b]
        label = [new if x == old else x for x in label]
    return len(set(label)) == 1
