"""What no pipeline of one replica undercuts: walks under thresholds, and intervals between them.

A step takes `fill + (n - 1) * period`. Let F(B) be the least fill of a walk whose period is at most B. A pipeline with
a period in (low, high] takes at least F(high) + (n - 1) low. The interval that bounds lowest is looked into first: its
walk says where it may be divided. A walk that uses a device twice is no pipeline: then that device's kind is tracked.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from isthmus.verification.device_sets import INFINITE, Tracked, grown, set_count
from isthmus.verification.walks import Terms, Walks

NARROW = 1e-8
"""Relative: so close above a period begins the interval of what is no faster."""
FEW_STATES = 64
"""Up to so many, all kinds are tracked from the start."""
THIN = 1e-6
"""Relative width of an interval that is not halved."""


class PeriodInterval(NamedTuple):
    """Pipelines with a period in low..high take at least `bound_s`."""

    bound_s: float
    low: float
    high: float
    fill_s: float = 0.0
    """F(high), where it is known."""
    period_s: float = 0.0
    """Of the walk that has this fill."""
    repeats: tuple[int, ...] = ()
    """Kinds of which that walk uses more devices than there are."""
    age: int = -1
    """How many kinds were tracked when it was looked into; -1: it was not."""


class OneReplica:
    """The search of one problem. `goal_s` is what a known plan takes, or a bound that is to be proven."""

    def __init__(self, walks: Walks, micro_batches: int, goal_s: float, most_states: int) -> None:
        self._walks, self._later, self.goal_s = walks, micro_batches - 1, goal_s
        self._most_states = most_states
        every = range(len(walks.kinds.all))
        self._tracked = Tracked(walks.kinds, every if set_count(walks.kinds, every) <= FEW_STATES else ())
        low = walks.shortest_period_s() * (1 - NARROW)
        # A longer period alone takes the goal.
        self._open = [PeriodInterval(0.0, low, goal_s / self._later if self._later else INFINITE)]

    @property
    def bound_s(self) -> float:
        """What is proven so far."""
        return min(self.goal_s, self._open[0].bound_s) if self._open else self.goal_s

    def run(self, ended: Callable[[], bool]) -> float:
        """Until the goal is proven, nothing more can be, or it is ended; the bound in seconds."""
        while self._open and self._open[0].bound_s < self.goal_s and not ended():
            interval = heapq.heappop(self._open)
            if interval.age < len(self._tracked.kinds):
                self._look(interval)
            elif not self._divide(interval) and not self._track(interval):
                heapq.heappush(self._open, interval)
                break
        return self.bound_s

    def _look(self, interval: PeriodInterval) -> None:
        terms = Terms(threshold_s=interval.high, more_than=self._later)
        stages = self._walks.stages(terms)
        found = self._walks.solve(self._tracked, terms, stages)
        fill_s = float(found[..., -1].min())
        if fill_s == INFINITE:
            return
        walk = self._walks.follow(self._tracked, terms, found, stages)
        repeats = tuple(grown(self._tracked, self._walks.kinds, Counter(walk.kinds)))
        bound_s = max(interval.bound_s, fill_s + self._later * interval.low)
        looked = PeriodInterval(
            bound_s, interval.low, interval.high, fill_s, walk.period_s, repeats, len(self._tracked.kinds)
        )
        heapq.heappush(self._open, looked)

    def _divide(self, interval: PeriodInterval) -> bool:
        """Where its walk's period is, or in the middle; False where neither could tell more."""
        _, low, high, fill_s, period_s, _, _ = interval
        if not self._later:
            return False
        if low < period_s * (1 - 2 * NARROW) and period_s < high * (1 - 2 * NARROW):
            at = period_s * (1 - NARROW)
        elif period_s >= high * (1 - 2 * NARROW) and high - low > THIN * high:
            at = max((low + high) / 2, high / 4)  # a round trip holds the walk up for longer than its stages do
        else:
            return False
        heapq.heappush(self._open, PeriodInterval(fill_s + self._later * low, low, at))
        heapq.heappush(self._open, interval._replace(bound_s=fill_s + self._later * at, low=at))
        return True

    def _track(self, interval: PeriodInterval) -> bool:
        """One kind more; False where the walk is a pipeline, or there would be too many states."""
        for kind in interval.repeats:
            tracked = *self._tracked.kinds, kind
            if set_count(self._walks.kinds, tracked) <= self._most_states:
                self._tracked = Tracked(self._walks.kinds, tracked)
                heapq.heappush(self._open, interval)
                return True
        return False
