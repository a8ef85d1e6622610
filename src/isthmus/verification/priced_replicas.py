"""What several replicas take at least, by prices of devices: for fleets on which sets of devices are too many.

A device has a price, a number of micro-batches. A replica whose pipeline takes `fill` and whose period is p ends
1 + (T - fill) / p of them in a time T. What all R replicas end, M, is what they end beyond the prices of their devices,
and these prices, no more than those of all devices together. So one replica ends A = (M - all prices) / R beyond its
own or more, and with a period from `low` on

    T >= F + low (A - 1),        F = min over pipelines of fill + low * prices of its devices

which holds whatever the prices are. They are raised for devices that more than one of R such replicas would use, and
lowered for others (the Lagrangian dual of using each device once, by subgradients: Held and Karp 1971).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isthmus.verification.device_sets import INFINITE, Tracked
from isthmus.verification.stage_arrays import Floats
from isthmus.verification.walks import Terms, Walks

RATIO = 1.15
"""Between the ends of an interval of periods."""
BEGUN = (0.9, 0.5, 0.0)
"""Parts of the batch that all devices are worth at first, each by its speed; the last first."""
MOST_AT_ONCE = 2.0
"""Times what is proven, that prices are raised for at once."""
TINY = 1e-300
MOST_WORSE, MOST_TRIED = 3, 16
"""Prices in a row that bound no higher, after which steps are halved; and those that are tried."""


class _Periods(NamedTuple):
    """Replicas with a period from `low_s` to the terms' threshold, and so many micro-batches at most."""

    low_s: float
    most: int
    terms: Terms
    stages: Floats
    least_s: float
    """The least fill without prices."""


class _Tried(NamedTuple):
    """What such prices prove."""

    time_s: float = -INFINITE
    prices: Floats = np.zeros(0)
    uses: Floats = np.zeros(0)
    """[kind]: devices of the replica that takes so long."""
    low_s: float = 0.0


class _Ascent:
    """Of one range of numbers of replicas: prices that were tried."""

    def __init__(self, begun: list[Floats]) -> None:
        self.begun, self.begun_with, self.tried = begun, len(begun), 0
        """`begun`: prices to begin with, the last first."""
        self.best, self._rate, self._since = _Tried(), 1.0, 0
        self._last = self.best

    def next(self, owned: Floats, enough_s: float) -> Floats:
        """Prices that prove more, with luck. `owned`: [kind], devices that one replica may have."""
        if self.begun:
            return self.begun.pop()
        _, prices, uses, low_s = self._last
        up = low_s * (uses - owned)
        up = np.where((up > 0) | (prices > 0), up, 0.0)
        gain_s = min(enough_s, MOST_AT_ONCE * self._last.time_s) - self._last.time_s
        return np.maximum(0.0, prices + self._rate * gain_s / max(float(up @ up), TINY) * up)

    def note(self, tried: _Tried) -> None:
        self.tried, self._since, self._last = self.tried + 1, self._since + 1, tried
        if tried.time_s > self.best.time_s:
            self.best, self._since = tried, 0
        if self.tried == self.begun_with:
            self._last = self.best
        if self._since == MOST_WORSE:
            self._rate, self._since = self._rate / 2, 0


class PricedReplicas:
    """Of one problem. `goal_s`: a bound that is enough."""

    def __init__(self, walks: Walks, micro_batches: int, goal_s: float) -> None:
        self._walks, self._micro_batches, self._goal_s = walks, micro_batches, goal_s
        self._tracked, counts = Tracked(walks.kinds, ()), walks.kinds.counts
        worth = walks.kinds.speed * micro_batches / float(counts @ walks.kinds.speed)
        self._begun = [part * worth for part in BEGUN]
        self._ascents: dict[tuple[int, int], _Ascent] = {}

    def raised(self, replicas: tuple[int, int], enough_s: float, ended: Callable[[], bool]) -> tuple[float, bool]:
        """What micro-batches of so many replicas take at least, and whether more may be proven. `enough_s`: at most."""
        if replicas not in self._ascents:
            near = min(self._ascents, key=lambda other: abs(other[1] - replicas[1]), default=None)
            others = [] if near is None else [self._ascents[near].best.prices]
            self._ascents[replicas] = _Ascent([*self._begun, *others])
        ascent, owned = self._ascents[replicas], self._walks.kinds.counts / replicas[1]
        while ascent.tried < MOST_TRIED and ascent.best.time_s < enough_s and not ended():
            ascent.note(self._least(ascent.next(owned, enough_s), replicas))
        more = ascent.tried < MOST_TRIED and ascent.best.time_s < enough_s
        return min(ascent.best.time_s, enough_s), more

    def _least(self, prices: Floats, replicas: tuple[int, int]) -> _Tried:
        """Intervals are looked at as what they take without prices bounds them."""
        walks, left = self._walks, self._micro_batches - float(prices @ self._walks.kinds.counts)
        each = min(left / number for number in replicas)
        if not prices.any():
            each = math.ceil(each)  # some replica has so many
        found = _Tried(INFINITE, prices, np.zeros(len(prices)))
        possible = [(p.least_s + p.low_s * (each - 1), k) for k, p in enumerate(self._periods) if p.most >= each]
        for least_s, k in sorted(possible):
            if least_s >= found.time_s:
                break
            periods = self._periods[k]
            terms = replace(periods.terms, prices_s=periods.low_s * prices)
            fills = walks.solve(self._tracked, terms, periods.stages)
            time_s = float(fills[..., -1].min()) + periods.low_s * (each - 1)
            if time_s < found.time_s:
                uses = Counter(walks.follow(self._tracked, terms, fills, periods.stages).kinds)
                each_used = np.array([uses[kind] for kind in range(len(prices))])
                found = _Tried(time_s, prices, each_used, periods.low_s)
        return found

    @cached_property
    def _periods(self) -> list[_Periods]:
        """Intervals of periods in which there are pipelines."""
        walks, shortest_s = self._walks, self._walks.shortest_period_s() * (1 - 1e-9)
        every = (shortest_s * RATIO**k for k in itertools.count())
        ends = list(itertools.takewhile(lambda end: end < self._goal_s, every))
        found = list[_Periods]()
        for more_than, most in walks.held_ranges(self._micro_batches - 1):
            for low, high in reversed(list(itertools.pairwise([*ends, INFINITE]))):
                terms = Terms(threshold_s=high, more_than=more_than)
                stages = walks.stages(terms)
                fill_s = float(walks.solve(self._tracked, terms, stages)[..., -1].min())
                if fill_s >= self._goal_s:
                    break  # no pipeline is as fast: none is faster
                found.append(_Periods(low, most, terms, stages, fill_s))
        return found
