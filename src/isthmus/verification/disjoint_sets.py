"""Sets of devices that share none: what they are worth together, by dynamic programming and by looking at each choice.

With `best[n, state]`, the most that n disjoint sets within a state are worth:

    best[n, state] = max over parts of the state of value[part] + best[n - 1, state - part]

A choice has the set that is worth most first. It is not continued once what it is worth, and the most that n further
sets may add, is less than what is needed:

    value[part] + min(best[n, state - part], n * value[part]) < need
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isthmus.verification.device_sets import INFINITE, Tracked
from isthmus.verification.stage_arrays import Floats, Ints


class Together(NamedTuple):
    """The most that disjoint sets of devices are worth, and the sets."""

    value: float
    states: tuple[int, ...]


class CutsNeeded(NamedTuple):
    """How many cuts replicas have at least, so that no two devices sum too much with each other."""

    all: int = 0
    pair: int = 0

    def allow(self, devices: Sequence[int]) -> bool:
        """Return whether replicas of so many devices may have so many cuts."""
        fewest = sorted(devices)[:2]
        return sum(devices) - len(devices) >= self.all and sum(fewest) - 2 >= self.pair


def most_of_sizes(value: Floats, replicas: int, needed: CutsNeeded) -> float:
    """The most that so many replicas are worth. `value`: [devices], of one with so many; the last entry is all devices
    that there are.

    One replica has the fewest devices, n, and the others `pair + 2 - n` or more.
    """
    sizes, devices = np.arange(len(value)), len(value) - 1
    fewest = needed.all + replicas
    rest = sizes[:, None] - sizes[None, :]
    found, half = -INFINITE, (needed.pair + 3) // 2
    for least in range(1, half + 1):
        others = max(least, needed.pair + 2 - least) if least < half else half
        allowed = np.where((sizes >= others) & (sizes > 0), value, -INFINITE)
        total = np.where(sizes == least, value, -INFINITE) if least < half else allowed
        for _ in range(replicas - 1):
            total = np.where(rest >= 0, total[rest] + allowed[None, :], -INFINITE).max(axis=1)
        found = max(found, float(total[min(fewest, devices + 1) :].max(initial=-INFINITE)))
    return found


class DisjointSets:
    """`value`: [state], of a set of exactly these devices; no set is worth minus infinity. The first state is a set
    without tracked devices, of which there may be any number."""

    def __init__(self, tracked: Tracked, value: Floats, most: int) -> None:
        self._tracked, self._value = tracked, value
        self._best = [np.zeros(len(value))]
        for _ in range(most):
            row = value[0] + self._best[-1]
            if tracked.size > 1:
                part, rest, starts = tracked.parts
                row[1:] = np.maximum(row[1:], np.maximum.reduceat(value[part] + self._best[-1][rest], starts))
            self._best.append(row)

    def best(self, fewest: int) -> Together:
        """Return the best choice of so many sets or more."""
        count = max(range(fewest, len(self._best)), key=lambda n: self._best[n][-1])
        value, state, states = float(self._best[count][-1]), self._tracked.size - 1, list[int]()
        while value > -INFINITE and len(states) < count:
            parts = self._parts(state)
            worth = self._value[parts] + self._best[count - len(states) - 1][state - parts]
            states.append(int(parts[worth.argmax()]))
            state -= states[-1]
        return Together(value, tuple(states))

    def choices(self, need: float) -> Iterator[tuple[int, ...]]:
        """Every choice of the greatest number of sets that is worth so much, each once."""
        return self._extended((), need, self._tracked.size - 1)

    def _extended(self, chosen: tuple[int, ...], need: float, state: int) -> Iterator[tuple[int, ...]]:
        left = len(self._best) - 1 - len(chosen)
        if not left:
            yield chosen
            return
        parts = self._parts(state)
        parts = parts[self._rank[parts] >= self._rank[chosen[-1]]] if chosen else parts
        value = self._value[parts]
        if left > 1:
            value = value + np.minimum(self._best[left - 1][state - parts], (left - 1) * value)
        for part in parts[value >= need].tolist():
            yield from self._extended((*chosen, part), need - float(self._value[part]), state - part)

    @cached_property
    def _rank(self) -> Ints:
        """[state]: how many sets are worth more."""
        rank = np.empty(len(self._value), dtype=np.int64)
        rank[np.argsort(-self._value, kind="stable")] = np.arange(len(rank))
        return rank

    def _parts(self, state: int) -> Ints:
        return np.append(self._tracked.parts_of(state), 0) if state else np.zeros(1, dtype=np.int64)
