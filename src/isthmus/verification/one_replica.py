"""A bound of all pipelines of one replica: walks under thresholds, and intervals between them.

A step takes `fill + (n - 1) * period`. Let F(B) be the least fill of a walk whose period is at most B. A pipeline with
a period in (low, high] takes at least F(high) + (n - 1) low. The interval that bounds lowest is looked into first: its
walk says where it may be divided. A walk that uses a device twice is no pipeline: then that device's kind is tracked.

Devices that no link joins within a threshold are apart: a pipeline is among some of them. Each of these is a case for
itself, with fewer devices to track. Where nothing of this raises the bound, pipelines are searched (`suffixes`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from isthmus.verification.device_sets import INFINITE, Tracked, grown, set_count
from isthmus.verification.pipelines import Goal, SearchedPipelines
from isthmus.verification.suffixes import SuffixSearch
from isthmus.verification.walks import Terms, Walks

NARROW = 1e-8  # relative: so close above a period begins the interval of what is no faster
FEW_STATES = 64  # up to so many, all kinds are tracked from the start
MOST_ENTRIES = 50_000_000
"""Entries of one dynamic programme. On large problems pipelines are searched sooner, with fewer tracked kinds."""
THIN = 0.01  # relative width of an interval that is not halved


class PeriodInterval(NamedTuple):
    """Pipelines with a period in low..high take at least `bound_s`."""

    bound_s: float
    low: float
    high: float
    fill_s: float = 0.0  # f(high), where it is known
    period_s: float = 0.0  # the period of the walk that has this fill
    repeats: tuple[int, ...] = ()  # kinds of which that walk uses more devices than there are
    age: int = -1  # how many kinds were tracked when it was looked into; -1: it was not
    among: tuple[int, ...] = ()  # kinds of devices that they have
    search: SuffixSearch | None = None  # where nothing else raises the bound


class OneReplica:
    """The search of one problem."""

    def __init__(
        self,
        walks: Walks,
        micro_batches: int,
        goal: Goal,
        most_states: int,
        pipelines: SearchedPipelines | None = None,
    ) -> None:
        """Without `pipelines` these are not looked at one by one."""
        self._walks, self._later, self._goal = walks, micro_batches - 1, goal
        self._most_states, self._pipelines = min(most_states, MOST_ENTRIES // walks.entries), pipelines
        self._known: dict[tuple[int, ...], Tracked] = {}
        low = walks.shortest_period_s() * (1 - NARROW)
        # A longer period alone takes the goal.
        high = goal.step_s / self._later if self._later else INFINITE
        self._open = [PeriodInterval(0.0, low, high, among=tuple(range(len(walks.kinds.all))))]

    def _tracked(self, among: tuple[int, ...]) -> Tracked:
        if among not in self._known:
            few = set_count(self._walks.kinds, among) <= FEW_STATES
            self._known[among] = Tracked(self._walks.kinds, among if few else ())
        return self._known[among]

    @property
    def bound_s(self) -> float:
        return min(self._goal.step_s, self._open[0].bound_s) if self._open else self._goal.step_s

    def run(self, ended: Callable[[], bool]) -> float:
        """Until the goal is proven, nothing more can be, or it is ended; the bound in seconds."""
        while self._open and self._open[0].bound_s < self._goal.step_s and not ended():
            interval = heapq.heappop(self._open)
            if interval.search is None and interval.age < len(self._tracked(interval.among).kinds):
                self._look(interval)
            elif interval.search is None and (self._divide(interval) or self._track(interval)):
                continue
            elif not self._search(interval, ended):
                break
        return self.bound_s

    def _search(self, interval: PeriodInterval, ended: Callable[[], bool]) -> bool:
        """Its pipelines one by one, until it is no longer the lowest; False where that raises nothing more."""
        search = interval.search
        if search is None and self._pipelines is not None:
            terms = Terms(threshold_s=interval.high, more_than=self._later, among=interval.among)
            tracked = self._tracked(interval.among)
            search = SuffixSearch(self._pipelines, tracked, terms, interval.low, self._goal.step_s)
        if search is not None:
            search.run(self._open[0].bound_s if self._open else self._goal.step_s, ended)
            interval = interval._replace(bound_s=max(interval.bound_s, search.bound_s), search=search)
        if interval.bound_s < self._goal.step_s:
            heapq.heappush(self._open, interval)
        return search is not None and not search.done

    def _look(self, interval: PeriodInterval) -> None:
        parts = self._walks.components(interval.among, interval.high, self._goal.step_s)
        if len(parts) > 1:
            for part in parts:
                heapq.heappush(self._open, interval._replace(age=-1, among=part))
            return
        tracked = self._tracked(interval.among)
        terms = Terms(threshold_s=interval.high, more_than=self._later, among=interval.among)
        stages = self._walks.stages(terms)
        found = self._walks.solve(tracked, terms, stages)
        fill_s = float(found[..., -1].min())
        if fill_s == INFINITE:
            return
        walk = self._walks.follow(tracked, terms, found, stages)
        repeats = tuple(grown(tracked, self._walks.kinds, Counter(walk.kinds)))
        bound_s = max(interval.bound_s, fill_s + self._later * interval.low)
        looked = interval._replace(bound_s=bound_s, fill_s=fill_s, period_s=walk.period_s, repeats=repeats)
        heapq.heappush(self._open, looked._replace(age=len(tracked.kinds)))

    def _divide(self, interval: PeriodInterval) -> bool:
        """Where its walk's period is, or in the middle; False where neither could tell more."""
        _, low, high, fill_s, period_s, *_ = interval
        if not self._later:
            return False
        if low < period_s * (1 - 2 * NARROW) and period_s < high * (1 - 2 * NARROW):
            at = period_s * (1 - NARROW)
        elif period_s >= high * (1 - 2 * NARROW) and high - low > THIN * high:
            at = max((low + high) / 2, high / 4)  # a round trip holds the walk up for longer than its stages do
        else:
            return False
        heapq.heappush(self._open, PeriodInterval(fill_s + self._later * low, low, at, among=interval.among))
        heapq.heappush(self._open, interval._replace(bound_s=fill_s + self._later * at, low=at))
        return True

    def _track(self, interval: PeriodInterval) -> bool:
        """One kind more; False where the walk is a pipeline, or there would be too many states."""
        for kind in interval.repeats:
            tracked = *self._tracked(interval.among).kinds, kind
            if set_count(self._walks.kinds, tracked) <= self._most_states:
                self._known[interval.among] = Tracked(self._walks.kinds, tracked)
                heapq.heappush(self._open, interval)
                return True
        return False
