"""Whether several replicas can end all micro-batches by a limit: what each set of devices does at most, and how sets
that share no device add up.

A replica whose micro-batch alone takes `fill` and whose period is p ends at most `1 + (limit - sums - fill) / p` of
them. Under thresholds p in (low, high] walks give the least fill of each set of devices. The sums of gradients take
some time in (low, high] too: then no device has more to sum than its links carry in `high`, and the micro-batches have
`limit - low`. Intervals of both are divided where they leave it open.

Where kinds are too many to count each device, those that are not tracked have a price in micro-batches: walks pay it,
and all such devices together are worth the sum (the Lagrangian dual of using each device once).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from isthmus.verification.stage_arrays import Floats
from isthmus.verification.walks import INFINITE, Terms, Tracked, Walks

WHOLE = 1e-9
"""Micro-batches: so close below a whole number is one."""
COARSE = 1.6
"""Ratio between the ends of an interval of periods at first."""
PRICES = (0.0, 0.3, 0.6, 1.0)
"""Of devices that are not tracked. At 0 a replica may have them all, and replicas alone are counted."""
ASKED = 20_000
"""Work of a question whose walks are known."""
FINE = 0.002
"""Relative width below which intervals are not divided: what is open then stays open."""


@dataclass(frozen=True)
class Periods:
    """Periods in low..high, and what replicas end with them."""

    low: float
    high: float
    more_than: int
    most: int
    fill_s: Floats
    """[state]: the least fill with a period up to `high`."""
    ended: Floats
    """[state]: micro-batches, prices taken off."""
    summed: bool = False
    """Whether its walks keep to the time for sums; without that, walks are found once for all of them."""


class Asked(NamedTuple):
    """Of so many replicas: micro-batches have this time, and sums no more than theirs."""

    time_s: float
    sums_s: float
    fewest: int
    most: int

    def terms(self, threshold_s: float, more_than: int, prices_s: Floats) -> Terms:
        return Terms(
            threshold_s=threshold_s,
            more_than=more_than,
            prices_s=prices_s if prices_s.any() else None,
            sums_s=self.sums_s,
            replicas=self.fewest,
        )


class Together(NamedTuple):
    """The most micro-batches of disjoint sets of devices, and the sets."""

    micro_batches: float
    states: tuple[int, ...]


class SeveralReplicas:
    """The question of one problem. `least_sums_s`: what sums of gradients take at least."""

    def __init__(self, walks: Walks, micro_batches: int, least_sums_s: float, most_states: int) -> None:
        self._walks, self._micro_batches, self._least_sums_s = walks, micro_batches, least_sums_s
        kinds = walks.kinds
        tracked = list[int]()
        for kind in np.argsort(-kinds.speed, kind="stable").tolist():
            if Tracked(kinds, (*tracked, kind)).size <= most_states:
                tracked.append(kind)
        self._tracked = Tracked(kinds, tracked)
        self._free = np.array([k for k in range(len(kinds.all)) if k not in tracked], dtype=np.int64)
        self._work = walks.least_work_s()
        most = min(int(kinds.counts.sum()), micro_batches)
        ends = [2, 3, *itertools.takewhile(lambda n: n <= most, (1 << k for k in itertools.count(2))), most + 1]
        self._replicas = [(a, b - 1) for a, b in itertools.pairwise(sorted({end for end in ends if end <= most + 1}))]
        """Ranges of their number."""
        self._fills: dict[Hashable, Floats] = {}

    def proven(self, limit_s: float, ended: Callable[[], bool]) -> bool:
        """Whether no plan of two replicas or more takes less; False where that was not settled."""
        first = self._least_sums_s
        # The same edges for every limit: walks are solved once for all of them.
        unit = self._walks.shortest_period_s() / 4
        ends = itertools.takewhile(lambda end: end < limit_s, (first + unit * 4**k for k in itertools.count()))
        edges = list(itertools.pairwise([first, *ends, limit_s])) if first < limit_s else []
        todo = [(replicas, *ends) for replicas in self._replicas for ends in edges]
        while todo:
            replicas, low, high = todo.pop()
            thin = (high - low) / limit_s
            asked = Asked(limit_s - low, high, *replicas)
            if not self._too_few(asked, max(thin, FINE), ended):
                if thin < FINE or ended():
                    return False
                middle = (low + high) / 2
                todo += [(replicas, low, middle), (replicas, middle, high)]
        return True

    def _too_few(self, asked: Asked, fine: float, ended: Callable[[], bool]) -> bool:
        """Whether all replicas end fewer micro-batches than there are.

        The intervals of periods by which the best sets do so well are divided, down to a relative width.
        """
        parts = PRICES if len(self._free) else (0.0,)
        return any(self._few_at(asked, fine, part, ended) for part in parts)

    def _few_at(self, asked: Asked, fine: float, part: float, ended: Callable[[], bool]) -> bool:
        """As `_too_few`, where devices that are not tracked have this part of the price of what they end alone, if
        nothing else took time."""
        prices = np.zeros(len(self._walks.kinds.all))
        prices[self._free] = part * asked.time_s / self._work[self._free]
        left = float((prices * self._walks.kinds.counts)[self._free].sum())
        if left >= self._micro_batches:
            return False
        looked = self._coarse(asked, prices)
        while looked:
            every = np.stack([periods.ended for periods in looked])
            found = self._best(every.max(axis=0), asked.most)
            if found.micro_batches + left < self._micro_batches - WHOLE:
                return True
            critical = {int(every[:, state].argmax()) for state in found.states}
            widest = max(critical, key=lambda k: (not looked[k].summed, looked[k].high / looked[k].low), default=-1)
            if widest < 0 or ended():
                return False
            wide = looked.pop(widest)
            if not wide.summed:
                fill_s = self._fill(asked.terms(wide.high, wide.more_than, wide.low * prices))
                looked.append(self._ended(asked, replace(wide, summed=True, fill_s=fill_s), wide.low))
                continue
            if wide.high <= wide.low * (1 + fine):
                return False
            middle = (wide.low * min(wide.high, max(4 * wide.low, asked.time_s))) ** 0.5
            looked.append(self._ended(asked, wide, middle))
            terms = asked.terms(middle, wide.more_than, wide.low * prices)
            faster = replace(wide, high=middle, fill_s=self._fill(terms))
            looked.append(self._ended(asked, faster, wide.low))
        return left < self._micro_batches

    def _coarse(self, asked: Asked, prices: Floats) -> list[Periods]:
        """Intervals from the shortest period on, whatever sums take. A period above the time leaves one micro-batch."""
        free = asked._replace(sums_s=INFINITE, fewest=2)
        shortest_s = self._walks.shortest_period_s() * (1 - 1e-9)
        count = max(1, math.ceil(math.log(max(asked.time_s / shortest_s, 1.0)) / math.log(COARSE)))
        edges = [*(shortest_s * COARSE**k for k in range(count + 1)), INFINITE]
        found: list[Periods] = []
        for more_than, most in self._walks.held_ranges(self._micro_batches - 1):
            for low, high in reversed(list(itertools.pairwise(edges))):
                fill_s = self._fill(free.terms(high, more_than, low * prices))
                if not (fill_s <= asked.time_s + 1e9 * bool(prices.any())).any():
                    break  # no walk is as fast: none is faster
                found.append(self._ended(asked, Periods(low, high, more_than, most, fill_s, fill_s), low))
        return found

    def _ended(self, asked: Asked, periods: Periods, low: float) -> Periods:
        """With periods of `low` at least."""
        ended = 1 + (asked.time_s - periods.fill_s) / low
        if not len(self._free):
            ended = np.where(periods.fill_s <= asked.time_s, np.floor(ended + WHOLE), 0.0)
        ended = np.where(np.isfinite(periods.fill_s), np.minimum(ended, periods.most), 0.0)
        return replace(periods, low=low, ended=np.maximum(ended, 0.0))

    def _best(self, most: Floats, replicas: int) -> Together:
        """By states in the order of their numbers: a set is one replica's own and a smaller set, or a smaller set. No
        more replicas than that have no tracked device, and none ends more than the best."""
        best, chosen = np.zeros(len(most)), np.zeros(len(most), dtype=np.int64)
        for state, parts in enumerate(self._tracked.parts):
            if len(parts):
                values = most[parts] + best[state - parts]
                k = int(values.argmax())
                best[state], chosen[state] = values[k], parts[k]
        state, states = len(most) - 1, list[int]()
        while state:
            states.append(int(chosen[state]))
            state -= states[-1]
        apart = Together(float(best[-1]) + replicas * float(most[0]), tuple({*states, 0}))
        alike = Together(replicas * float(most.max()), (int(most.argmax()),))
        return min(apart, alike)  # neither is exceeded

    def _fill(self, terms: Terms) -> Floats:
        """[state]: the least fill."""
        self._walks.work += ASKED
        key = self._walks.alike(terms)
        if key not in self._fills:
            found = self._walks.solve(self._tracked, terms, self._walks.stages(terms))
            self._fills[key] = found[..., -1].min(axis=(0, 2))
        return self._fills[key]
