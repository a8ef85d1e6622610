"""A bound of the time of several replicas' micro-batches, by prices of devices: sets of devices may be too many.

A device has a price of 0 or more micro-batches. A replica whose pipeline takes `fill` and whose period is p ends
1 + (T - fill) / p of them in a time T, sums apart. What all R replicas end, M, is what they end beyond the prices of
their devices, and these prices, no more than those of all devices together. So one replica ends
A = (M - all prices) / R beyond its own or more, and with a period from `low` on

    T >= F + low (A - 1),        F = min over pipelines of fill + low * prices of its devices

for any prices. Where R is one of a range, A is the least of any. Prices are raised for devices that more than one of R
such replicas would use, and lowered for others (the Lagrangian dual of using each device once, by subgradients: Held
and Karp 1971). They do not depend on what is to be proven: a check tries the same.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from isthmus.verification.device_sets import INFINITE, Tracked
from isthmus.verification.replica_search import WHOLE
from isthmus.verification.stage_arrays import Floats
from isthmus.verification.walks import NARROW, Terms, Walks

RATIO = 1.15  # between the ends of an interval of periods
BEGUN = (0.0, 0.5, 0.9)  # parts of the batch that all devices are worth at first, each by its speed
MOST_WORSE, MOST_TRIED = 3, 16
"""Prices in a row that bound no higher, after which steps are halved; and those that are tried."""
TINY = 1e-300


class _Periods(NamedTuple):
    """Replicas with a period from `low_s` to the terms' threshold, and so many micro-batches at most; two at least, or
    one alone, which has any period: `low_s` may then be anything."""

    low_s: float
    most: int
    terms: Terms
    fill_s: float  # the least without prices

    def least_s(self, each: float) -> float:
        """Return the least time of a replica that ends so many beyond its prices, without these prices."""
        return self.fill_s + self.low_s * max(each - 1, 0.0 if self.most == 1 else 1.0)


class _Tried(NamedTuple):
    """A bound that prices prove."""

    time_s: float
    prices: Floats
    uses: Floats  # [kind]: devices of the replica that takes so long
    low_s: float


class _Ascent:
    """The prices that were tried for one range of numbers of replicas."""

    def __init__(self, begun: list[Floats], owned: Floats) -> None:
        """`owned`: [kind], devices that one replica may have."""
        self._begun, self._owned, self.tried = begun, owned, list[_Tried]()
        self._rate, self._since, self.best_s = 1.0, 0, -INFINITE

    def next(self) -> Floats:
        """Prices that prove more, with luck."""
        if len(self.tried) < len(self._begun):
            return self._begun[len(self.tried)]
        first = len(self.tried) == len(self._begun)
        _, prices, uses, low_s = max(self.tried, key=lambda one: one.time_s) if first else self.tried[-1]
        up = low_s * (uses - self._owned)
        up = np.where((up > 0) | (prices > 0), up, 0.0)
        return np.maximum(0.0, prices + self._rate * abs(self.best_s) / max(float(up @ up), TINY) * up)

    def note(self, tried: _Tried) -> None:
        self.tried.append(tried)
        self._since = 0 if tried.time_s > self.best_s else self._since + 1
        self.best_s = max(self.best_s, tried.time_s)
        if self._since == MOST_WORSE:
            self._rate, self._since = self._rate / 2, 0


class PricedReplicas:
    """The bounds of one problem. `goal_s`: a bound that is enough."""

    def __init__(self, walks: Walks, micro_batches: int, goal_s: float) -> None:
        self._walks, self._micro_batches, self._goal_s = walks, micro_batches, goal_s
        self._tracked, counts = Tracked(walks.kinds, ()), walks.kinds.counts
        worth = walks.kinds.speed * micro_batches / float(counts @ walks.kinds.speed)
        self._begun = [part * worth for part in BEGUN]
        self._ascents: dict[tuple[int, int], _Ascent] = {}
        self._periods, self._unknown = list[_Periods](), self._intervals()

    def raised(self, replicas: tuple[int, int], enough_s: float, ended: Callable[[], bool]) -> tuple[float, bool]:
        """Return a bound of the micro-batches of so many replicas, up to `enough_s`, and whether more may be proven."""
        ascent = self._ascents.setdefault(replicas, _Ascent(self._begun, self._walks.kinds.counts / replicas[1]))
        while self._unknown and not ended():
            self._look(*self._unknown.pop())
        while len(ascent.tried) < MOST_TRIED and ascent.best_s < enough_s and not self._unknown:
            tried = self._proven_by(ascent.next(), replicas, ended)
            if tried is None:
                break
            ascent.note(tried)
        return min(ascent.best_s, enough_s), len(ascent.tried) < MOST_TRIED and ascent.best_s < enough_s

    def _intervals(self) -> list[tuple[Terms, float, int]]:
        """Terms, shortest period and most micro-batches; the longest periods last, and one micro-batch alone."""
        shortest_s, alone_s = self._walks.shortest_period_s(), float(self._walks.least_work_s().min())
        every = (shortest_s * (1 - NARROW) * RATIO**k for k in itertools.count())
        ends = list(itertools.takewhile(lambda end: end < self._goal_s, every))
        ends.append(ends[-1] * RATIO if ends else shortest_s)
        found = [
            (Terms(threshold_s=high, more_than=more_than), low, most)
            for more_than, most in self._walks.held_ranges(self._micro_batches - 1)
            for low, high in itertools.pairwise(ends)
            if most > 1
        ]
        return [*found, (Terms(threshold_s=INFINITE, more_than=0), alone_s, 1)]

    def _look(self, terms: Terms, low_s: float, most: int) -> None:
        """Kept where there are pipelines."""
        found = self._walks.solve(self._tracked, terms, self._walks.stages(terms))
        fill_s = float(found[..., -1].min())
        if fill_s < self._goal_s:
            self._periods.append(_Periods(low_s, most, terms, fill_s))
            return
        # No pipeline is as fast: none is faster.
        self._unknown = [one for one in self._unknown if one[0].more_than != terms.more_than or one[2] != most]

    def _proven_by(self, prices: Floats, replicas: tuple[int, int], ended: Callable[[], bool]) -> _Tried | None:
        """None where it was ended. Intervals that take least without prices are looked at first."""
        walks, left = self._walks, self._micro_batches - float(prices @ self._walks.kinds.counts)
        each = min(left / number for number in replicas)
        if not prices.any():
            each = math.ceil(each - WHOLE)  # some replica has so many
        found = _Tried(INFINITE, prices, np.zeros(len(prices)), 0.0)
        possible = [periods for periods in self._periods if periods.most >= each - WHOLE]
        for periods in sorted(possible, key=lambda one: one.least_s(each)):
            least_s, low_s = periods.least_s(each), periods.low_s
            if least_s >= found.time_s:
                break
            if ended():
                return None
            terms = replace(periods.terms, prices_s=low_s * prices)
            stages = walks.stages(terms)
            fills = walks.solve(self._tracked, terms, stages)
            time_s = max(least_s, float(fills[..., -1].min()) + low_s * (each - 1))
            if time_s < found.time_s:
                used = Counter(walks.follow(self._tracked, terms, fills, stages).kinds)
                found = _Tried(time_s, prices, np.array([used[kind] for kind in range(len(prices))]), low_s)
        return found
