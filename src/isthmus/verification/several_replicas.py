"""Whether several replicas can end all micro-batches by a limit: what each set of devices does at most, and how sets
that share no device add up.

A replica whose micro-batch alone takes `fill` and whose period is p ends at most `1 + (limit - sums - fill) / p` of
them. Under thresholds p in (low, high] walks give the least fill of each set of devices. The sums of gradients take
some time in (low, high] too: then no device has more to sum than `sum_limits` says of `high`, and the micro-batches
have `limit - low`. Intervals of both are divided where they leave it open.

Where sets could end all micro-batches, the replicas of each choice of them are searched (`replica_search`).

Where kinds are too many to count each device, those that are not tracked have a price in micro-batches: walks pay it,
and all such devices together are worth the sum (the Lagrangian dual of using each device once). Tracked are then the
fastest devices, or none, but how many a replica has.

Where it is known how many devices each replica has, all of them have enough cuts, or two devices sum too much with each
other (`sum_limits.PairSummed`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isthmus.verification.device_sets import INFINITE, Counted, Tracked, set_count
from isthmus.verification.disjoint_sets import CutsNeeded, DisjointSets, most_of_sizes
from isthmus.verification.group_times import GroupTimes
from isthmus.verification.pipelines import SearchedPipelines
from isthmus.verification.replica_search import WHOLE, JointSearch, PeriodTerms, PeriodWalks, ReplicaTables
from isthmus.verification.stage_arrays import Floats, Ints
from isthmus.verification.walks import Terms, Walks

COARSE = 1.6  # ratio between the ends of an interval of periods at first
PRICES = (1.0, 0.6, 0.3)
"""Prices of devices that are not tracked. Without one a replica may have them all, and only replicas are counted."""
LATE = 4.0  # times the time for micro-batches: a longer period leaves a replica one of them, and is not divided
SHARED = 1.05  # ratio between times whose prices are the same
ASKED = 20_000  # work of a question whose walks are known
WIDER = 1.15  # ratio between the ends of a range of numbers of replicas; the first numbers are ranges of their own
FEW_STATES, WIDE = 128, 0.03
"""More states are looked at with prices only where the interval of the time for sums is so narrow, of the limit."""
ALL_STATES = 2048  # up to so many, all kinds are tracked
MOST_CHOICES = 5000  # choices of sets whose replicas are searched


@dataclass(frozen=True)
class Periods:
    """Periods in low..high, and what replicas end with them."""

    low: float
    high: float
    more_than: int
    most: int
    fill_s: Floats  # [state]: the least fill with a period up to `high`
    summed: bool = False
    """Whether its walks keep to the time for sums; without that, walks are found once for all of them."""


class Asked(NamedTuple):
    """A question: whether so many replicas that sum for low_s to high_s end by the limit."""

    limit_s: float
    low_s: float
    high_s: float
    fewest: int
    most: int
    home: tuple[int, ...] | None = None
    """Kinds of devices among which the largest block of gradients is summed; None: any."""

    @property
    def time_s(self) -> float:
        """For micro-batches."""
        return self.limit_s - self.low_s


class Distinguished(NamedTuple):
    """Which devices are counted in a set."""

    tracked: Tracked
    free: Ints  # kinds of which any number may be in a set, for a price

    @property
    def counts_devices(self) -> bool:
        """Return whether a state says how many devices a set has."""
        return not len(self.free) or isinstance(self.tracked, Counted)


class Intervals(NamedTuple):
    each: list[Periods]
    prices: Floats
    among: Distinguished

    def ended(self, time_s: float) -> Floats:
        """[interval, state]: micro-batches of one replica in this time, prices taken off; minus infinity for none."""
        fill_s = np.stack([periods.fill_s for periods in self.each])
        low, most = (np.array([[getattr(p, name)] for p in self.each]) for name in ("low", "most"))
        ended = 1 + (time_s - fill_s) / low
        if not self.prices.any():
            ended = np.where(fill_s <= time_s, np.floor(ended + WHOLE), -INFINITE)
        return np.minimum(ended, most)


class SeveralReplicas:
    """The question of one problem. `least_sums_s`: what sums of gradients take at least."""

    def __init__(
        self,
        walks: Walks,
        micro_batches: int,
        least_sums_s: float,
        most_states: int,
        pipelines: SearchedPipelines | None = None,
    ) -> None:
        """Without `pipelines` no replicas are searched."""
        self._walks, self._micro_batches, self._most_states = walks, micro_batches, most_states
        kinds = walks.kinds
        self._among: dict[tuple[int, ...] | None, list[Distinguished]] = {}
        """How sets are distinguished, each a bound for itself, by where the largest block is summed."""
        self._last = 0
        self._needed: dict[tuple[float, int], CutsNeeded] = {}  # cuts of so many replicas that sum in so many seconds
        self._work = walks.least_work_s()
        self._devices = int(kinds.counts.sum())
        most = min(self._devices, micro_batches)
        ends = [2]
        while ends[-1] <= most:
            ends.append(min(max(ends[-1] + 1, int(ends[-1] * WIDER)), most + 1))
        self.ranges = [(a, b - 1) for a, b in itertools.pairwise(ends)]  # ranges of the number of replicas
        self._fills: dict[Hashable, Floats] = {}
        self._least_sums = {x: max(least_sums_s, walks.least_sums_s(*x)) for x in self.ranges}
        self._chosen = ChosenReplicas(pipelines) if pipelines is not None and pipelines.searchable else None
        self._shortest_s = walks.shortest_period_s() * (1 - 1e-9)

    @property
    def tracks_all(self) -> bool:
        """Return whether it distinguishes every set of devices."""
        return set_count(self._walks.kinds, range(len(self._walks.kinds.all))) <= ALL_STATES

    def least_sums_s(self, fewest: int, most: int) -> float:
        return self._least_sums[fewest, most]

    def proven(self, limit_s: float, replicas: tuple[int, int], fine: float, ended: Callable[[], bool]) -> bool:
        """Return whether no plan of so many replicas, one of the ranges, takes less; False where that was not settled
        by intervals of so much of the limit."""
        # The same edges for every limit: walks are solved once for all of them.
        first, unit = self._least_sums[replicas], self._shortest_s / 4
        if first >= limit_s:
            return True
        ends = itertools.takewhile(lambda end: end < limit_s, (first + unit * 4**k for k in itertools.count()))
        todo = list(itertools.pairwise([first, *ends, limit_s]))
        while todo:
            if self._refuted(limit_s):
                return False
            low, high = todo.pop()
            thin = (high - low) / limit_s
            asked = Asked(limit_s, low, high, *replicas)
            if not all(self._too_few(home, max(thin, fine), ended) for home in self._at_homes(asked)):
                if thin < fine or ended():
                    return False
                middle = (low + high) / 2
                todo += [(low, middle), (middle, high)]
        return True

    def _refuted(self, limit_s: float) -> bool:
        """A plan was come upon that takes less."""
        return self._chosen is not None and self._chosen.pipelines.goal.step_s < limit_s

    def _at_homes(self, asked: Asked) -> list[Asked]:
        """The same for each set of kinds among which the largest block may be summed."""
        homes = self._walks.homes(asked.high_s, asked.fewest, asked.most)
        every = len(self._walks.kinds.all)
        return [asked._replace(home=home if len(home) < every else None) for home in homes]

    def _among_at(self, home: tuple[int, ...] | None) -> list[Distinguished]:
        """All kinds tracked where there are few sets. Elsewhere the fastest are tracked, or devices are counted."""
        if home not in self._among:
            kinds, every = self._walks.kinds, range(len(self._walks.kinds.all))
            tracked = list(every) if self.tracks_all else list[int]()
            by_speed = np.argsort(-kinds.speed, kind="stable").tolist() if not tracked else []
            for kind in by_speed:
                if (home is None or kind in home) and set_count(kinds, (*tracked, kind)) <= self._most_states:
                    tracked.append(kind)
            free = np.array([k for k in every if k not in tracked], dtype=np.int64)
            counted = [Distinguished(Counted(kinds), np.arange(len(kinds.all)))] if len(free) else []
            self._among[home] = [Distinguished(Tracked(kinds, tracked), free), *counted]
        return self._among[home]

    def _too_few(self, asked: Asked, fine: float, ended: Callable[[], bool]) -> bool:
        """Return whether all replicas end fewer micro-batches than there are.

        The intervals of periods by which the best sets do so well are divided, down to a relative width.
        """
        ways = [(among, prices) for among in self._among_at(asked.home) for prices in self._prices(asked, among)]
        if asked.high_s - asked.low_s > WIDE * asked.limit_s:  # to divide it is less work
            ways = [way for way in ways if way[0].tracked.size <= FEW_STATES or not way[1].any()]
        last = min(self._last, len(ways) - 1)  # what settled the last question may well settle this one
        for number in dict.fromkeys((last, *range(len(ways)))):
            among, prices = ways[number]
            if self._few_at(asked, fine, Intervals([], prices, among), ended):
                self._last = number
                return True
        return False

    def _prices(self, asked: Asked, among: Distinguished) -> Iterator[Floats]:
        """[kind]: devices that are not tracked have a part of the price of what they end alone, if nothing else took
        time. So have only those among which the largest block is summed: others may be of no use."""
        yield np.zeros(len(self._work))
        # Prices that many limits share: walks are solved once for all of them.
        worth_s = self._shortest_s * SHARED ** math.floor(math.log(asked.time_s / self._shortest_s, SHARED))
        for kinds in (*([np.intersect1d(among.free, asked.home)] if asked.home else []), among.free):
            for part in PRICES if len(kinds) else ():
                prices = np.zeros(len(self._work))
                prices[kinds] = part * worth_s / self._work[kinds]
                yield prices

    def _few_at(self, asked: Asked, fine: float, looked: Intervals, ended: Callable[[], bool]) -> bool:
        """Return the same as `_too_few`, at these prices."""
        prices, among = looked.prices, looked.among
        left = float((prices * self._walks.kinds.counts).sum())
        if left >= self._micro_batches or not self._coarse(asked, looked, ended):
            return False
        while not ended() and not self._refuted(asked.limit_s):
            if not looked.each:
                return True
            every = looked.ended(asked.time_s)
            open_ = self._enough(looked, every, asked, self._micro_batches - left - WHOLE, ended)
            if not open_:
                return True
            widest = max(open_, key=lambda k: (not looked.each[k].summed, looked.each[k].high / looked.each[k].low))
            wide = looked.each.pop(widest)
            if not wide.summed:
                wide = replace(wide, summed=True)
                fill_s = self._fill(self._terms(asked, wide.high, wide, prices), among.tracked)
                looked.each.append(replace(wide, fill_s=fill_s))
            elif wide.most == 1 or wide.high <= wide.low * (1 + fine) or wide.low > LATE * asked.time_s:
                return False
            else:
                middle = (wide.low * min(wide.high, max(4 * wide.low, asked.time_s))) ** 0.5
                fill_s = self._fill(self._terms(asked, middle, wide, prices), among.tracked)
                looked.each.extend([replace(wide, low=middle), replace(wide, high=middle, fill_s=fill_s)])
        return False

    def _terms(self, asked: Asked, threshold_s: float, periods: Periods, prices: Floats) -> Terms:
        return Terms(
            threshold_s=threshold_s,
            more_than=periods.more_than,
            prices_s=periods.low * prices if prices.any() else None,
            sums_s=asked.high_s if periods.summed else INFINITE,
            fewest=asked.fewest,
            most=asked.most,
            home=asked.home if periods.summed else None,
            devices=self._devices - (asked.fewest if periods.summed else 2) + 1,
        )

    def _coarse(self, asked: Asked, found: Intervals, ended: Callable[[], bool]) -> bool:
        """Finds intervals from the shortest period on, whatever sums take; False where it was ended. A period above the
        time leaves one micro-batch."""
        prices = found.prices
        count = max(1, math.ceil(math.log(max(asked.time_s / self._shortest_s, 1.0)) / math.log(COARSE)))
        most_each = self._micro_batches - asked.fewest + 1
        if most_each == 1:
            count = 0
        edges = [*(self._shortest_s * COARSE**k for k in range(count + 1)), INFINITE]
        for more_than, most in self._walks.held_ranges(most_each):
            for low, high in reversed(list(itertools.pairwise(edges))):
                if ended():
                    return False
                periods = Periods(low, high, more_than, most, prices)
                fill_s = self._fill(self._terms(asked, high, periods, prices), found.among.tracked)
                if not (fill_s <= asked.time_s + 1e9 * bool(prices.any())).any():
                    break  # no walk is as fast: none is faster
                found.each.append(replace(periods, fill_s=fill_s))
        return True

    def _enough(
        self, looked: Intervals, every: Floats, asked: Asked, need: float, ended: Callable[[], bool]
    ) -> set[int]:
        """The intervals of periods by which disjoint sets may end so many micro-batches; none where no sets do."""
        among, best = looked.among, every.max(axis=0)
        if among.counts_devices and not self._enough_cuts(among.tracked, best, asked, need):
            return set()
        sets = DisjointSets(among.tracked, best, asked.most)
        self._walks.work += ASKED + asked.most * len(among.tracked.parts.part)
        found = sets.best(asked.fewest)
        if found.value < need:
            return set()
        unknown = {int(every[:, state].argmax()) for state in found.states}
        if len(among.free) or asked.fewest < asked.most:
            return unknown
        if self._chosen is None or not all(looked.each[k].summed for k in unknown):
            return unknown
        needed = self._cuts_needed(asked.high_s, asked.most)
        periods = [self._period_terms(asked, each, looked.prices) for each in looked.each]
        for number, choice in enumerate(sets.choices(need)):
            if number == MOST_CHOICES or ended():
                return unknown
            if not needed.allow(among.tracked.devices[list(choice)].tolist()):
                continue
            self._walks.work += ASKED
            most = every[:, list(choice)]
            # The fewest that each replica ends if the others end as many as they may.
            least = need - most.max(axis=0).sum() + most.max(axis=0)
            intervals = [
                [periods[at] for at in np.flatnonzero(ends >= fewest).tolist()]
                for ends, fewest in zip(most.T, least, strict=True)
            ]
            sums_s = asked.low_s, asked.high_s
            if not self._chosen.none_below(choice, intervals, asked.limit_s, sums_s, asked.home, ended):
                return set(most.argmax(axis=0).tolist())
        return set()

    def _period_terms(self, asked: Asked, periods: Periods, prices: Floats) -> PeriodTerms:
        terms = self._terms(asked, periods.high, replace(periods, summed=True), prices)
        key = periods.low, periods.most, self._walks.alike(terms)
        return PeriodTerms(periods.low, terms, periods.most, key)

    def _cuts_needed(self, sums_s: float, replicas: int) -> CutsNeeded:
        if (sums_s, replicas) not in self._needed:
            self._needed[sums_s, replicas] = self._walks.cuts_needed(sums_s, replicas)
        return self._needed[sums_s, replicas]

    def _enough_cuts(self, tracked: Tracked, best: Floats, asked: Asked, need: float) -> bool:
        """Return whether replicas with so many devices that they have enough cuts may end so many micro-batches."""
        value = np.full(int(tracked.devices.max()) + 1, -INFINITE)
        np.maximum.at(value, tracked.devices, best)
        for replicas in range(asked.fewest, asked.most + 1):
            needed = self._cuts_needed(asked.high_s, replicas)
            self._walks.work += ASKED + (needed.pair // 2 + 1) * replicas * len(value) ** 2
            if not needed.all or most_of_sizes(value, replicas, needed) >= need:
                return True
        return False

    def _fill(self, terms: Terms, tracked: Tracked) -> Floats:
        """[state]: the least fill."""
        self._walks.work += ASKED
        key = self._walks.alike(terms), tracked.kinds, tracked.size
        if key not in self._fills:
            found = self._walks.solve(tracked, terms, self._walks.stages(terms))
            self._fills[key] = found[..., -1].min(axis=(0, 2))
        return self._fills[key]


CONTINUED, MOST_CONTINUED = 1000, 64_000
"""Replicas of one choice that are continued, at first and at most: twice as many each time it was not settled."""
MOST_BYTES = 400_000_000  # memory of the walks that are kept, and of tables

Choice = tuple[int, ...]  # a state for each replica: its devices


class _Settled(NamedTuple):
    """No plan whose sums take so long takes less than the limit."""

    limit_s: float
    low_s: float
    high_s: float


class ChosenReplicas:
    """The search of one problem. All kinds of devices are tracked."""

    def __init__(self, pipelines: SearchedPipelines) -> None:
        walks = pipelines.walks
        self.pipelines = pipelines
        names = [kind.names for kind in walks.kinds.all]
        self._groups = GroupTimes(pipelines.question, names, walks.arrays.gradients[:, 0], pipelines.parameters)
        self._walked: dict[Hashable, tuple[Floats, Floats]] = {}
        self._tables: dict[Hashable, ReplicaTables] = {}
        self._settled: dict[Hashable, list[_Settled]] = {}
        self._continued = dict[Hashable, int]()
        self._bytes = 0

    @cached_property
    def _tracked(self) -> Tracked:
        kinds = self.pipelines.walks.kinds
        return Tracked(kinds, range(len(kinds.all)))

    def none_below(
        self,
        choice: Choice,
        intervals: Sequence[Sequence[PeriodTerms]],
        limit_s: float,
        sums_s: tuple[float, float],
        home: Hashable,
        ended: Callable[[], bool],
    ) -> bool:
        """Return whether no plan of these replicas, whose sums take so long, takes less than the limit; False where
        that was not settled. `intervals`: of each replica, the periods that it may have. `home`: where their terms have
        the largest block summed."""
        low_s, high_s = sums_s
        asked = choice, home
        settled = self._settled.setdefault(asked, [])
        if any(limit_s <= known.limit_s and known.low_s <= low_s and high_s <= known.high_s for known in settled):
            return True
        tables = [self._table(state, each) for state, each in zip(choice, intervals, strict=True)]
        most = self._continued.get(asked, CONTINUED)
        search = JointSearch(self.pipelines, self._groups, tables, most)
        found = search.none_below(limit_s, low_s, high_s, ended)
        if found:
            settled.append(_Settled(limit_s, low_s, high_s))
        else:
            self._continued[asked] = min(2 * most, MOST_CONTINUED)
        return found

    def _table(self, state: int, intervals: Sequence[PeriodTerms]) -> ReplicaTables:
        walks = self.pipelines.walks
        key = state, *(each.key for each in intervals)
        if key not in self._tables:
            walked = [PeriodWalks(each, *self._walk(each.terms)) for each in intervals]
            devices: Ints = np.zeros(len(walks.kinds.all), dtype=np.int64)
            devices[list(self._tracked.kinds)] = self._tracked.used[state]
            made = ReplicaTables(self.pipelines, devices, self._tracked, walked)
            self._make_room(made.bytes)
            self._tables[key] = made
        return self._tables[key]

    def _walk(self, terms: Terms) -> tuple[Floats, Floats]:
        """The stages that the terms allow, and the least fill of each set of devices."""
        walks = self.pipelines.walks
        key = walks.alike(terms)
        if key not in self._walked:
            stages = walks.stages(terms)
            found = walks.solve(self._tracked, terms, stages)
            self._make_room(found.nbytes)
            self._walked[key] = stages, found
        return self._walked[key]

    def _make_room(self, needed: int) -> None:
        self._bytes += needed
        if self._bytes > MOST_BYTES:
            self._walked.clear()
            self._tables.clear()
            self._bytes = needed
