"""Minimise `sum + (n - 1) * bottleneck` exactly, by searching over thresholds for the bottleneck.

Let m(B) be the least sum of all pipelines whose bottleneck is at most B. A solution found at threshold B with
bottleneck b <= B proves that nothing in [b, B] has a smaller sum, so that interval is closed. An open interval
(low, high) cannot beat the best plan known once m(high) + (n - 1) * low reaches it. Intervals are taken best bound
first. The first phase closes them with the relaxation; the second looks, exactly, into those that the
relaxation left below the best plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus.planners.observer import looked_at
from isthmus.planners.relaxation import Relaxation
from isthmus.planners.search.exact_cut import Best, Cost, SearchTooLarge, least_sum, objective

TOLERANCE = 1e-9
"""Relative; below it two step times are the same."""
NARROW = 0.1
"""Relative width below which an open interval is probed at its top, not at its middle."""


class Budget(NamedTuple):
    """Where a search stops; what is left open then shows in its lower bound. Counts, so that results repeat."""

    probes: int = 300
    states: int = 20_000


AMPLE = Budget()


class Interval(NamedTuple):
    """Pipelines with a bottleneck in low..high have at least this sum, and take at least `bound_s`."""

    bound_s: float
    low: float
    high: float
    sum_s: float


@dataclass
class ThresholdSearch:
    """The best pipeline of the relaxation's routes, and a proven lower bound on all of them.

    `upper_s` is a step time already known from elsewhere: what cannot beat it is not looked at.
    """

    relaxation: Relaxation
    micro_batches: int
    upper_s: float = float("inf")
    budget: Budget = AMPLE
    best: Best | None = None
    probes: int = 0
    states: int = 0
    unresolved: list[Interval] = field(default_factory=list[Interval])
    _open: list[Interval] = field(default_factory=list[Interval])

    def run(self) -> float:
        """Searches; returns the lower bound in seconds (infinite where no pipeline fits)."""
        gain = self.micro_batches - 1
        low = self._least_bottleneck()
        high = (self.upper_s - self._least_sum()) / gain if gain else float("inf")
        self._push(low, high, self._least_sum())
        while self._open and self._open[0].bound_s < self._goal() and self.probes < self.budget.probes:
            looked_at()
            self._probe(heapq.heappop(self._open))
        self.unresolved = [i for i in self.unresolved if i.bound_s < self._goal()]
        # The exact search does not know a device that comes twice: what is left open shows in the bound.
        if not self.relaxation.throttled and not self.relaxation.routes.returns:
            self._resolve()
        left = [i.bound_s for i in (*self._open, *self.unresolved)]
        return min([self.upper_s, *left])

    @property
    def step_s(self) -> float:
        """Of the best pipeline, shared parameters included."""
        apart = self.best.cost.shared_s if self.best and self.relaxation.throttled else 0.0
        return self.upper_s + apart

    def _goal(self) -> float:
        return self.upper_s * (1 - TOLERANCE)

    def _least_bottleneck(self) -> float:
        """Total work over the joint speed; just below it, as intervals exclude their low end."""
        relaxation = self.relaxation
        joint = sum(float(relaxation.network.speed[d]) for d in relaxation.routes.members)
        return float(relaxation.tables.blocks.work[-1]) / joint * (1 - TOLERANCE)

    def _least_sum(self) -> float:
        relaxation = self.relaxation
        fastest = max(float(relaxation.network.speed[d]) for d in relaxation.routes.members)
        return float(relaxation.tables.blocks.work[-1]) / fastest

    def _push(self, low: float, high: float, sum_s: float) -> None:
        if low < high:
            bound = sum_s + (self.micro_batches - 1) * low
            heapq.heappush(self._open, Interval(bound, low, high, sum_s))

    def _offer(self, cost: Cost, best: Best) -> None:
        step_s = cost.sum_s + (self.micro_batches - 1) * cost.bottleneck_s
        if step_s < self.upper_s:
            self.upper_s, self.best = step_s, best

    def _probe(self, interval: Interval) -> None:
        """Solves the relaxation inside an open interval and splits it."""
        gain, low, high = self.micro_batches - 1, interval.low, interval.high
        if gain:  # above this no sum that the interval allows can win
            high = min(high, (self._goal() - interval.sum_s) / gain)
        if low >= high:
            return
        wide = high - low > NARROW * high
        threshold = (low + high) / 2 if wide and high < float("inf") else high
        self.probes += 1
        found = self.relaxation.solve(threshold)
        if threshold < high:
            self._push(threshold, high, interval.sum_s)
        if found is None:
            return
        cost = objective(self.relaxation, found.path)
        self._offer(cost, Best(cost, found.path))
        bound = found.sum_s + gain * found.bottleneck_s
        self.unresolved.append(Interval(bound, found.bottleneck_s, threshold, found.sum_s))
        self._push(low, found.bottleneck_s * (1 - TOLERANCE), found.sum_s)

    def _resolve(self) -> None:
        """Exact search in the intervals that the relaxation closed below the best plan. Stops at its budget."""
        gain = self.micro_batches - 1
        heapq.heapify(self.unresolved)
        solved = 0.0
        while self.unresolved and self.unresolved[0].bound_s < self._goal():
            looked_at()
            interval = self.unresolved[0]
            # Bounds of a slightly larger threshold serve as well, and are at hand.
            if not interval.high <= solved <= 1.05 * interval.high:
                solved = min(1.02 * interval.high, max(i.high for i in self.unresolved))
                self.relaxation.solve(solved)
            cutoff_s = self._goal() - gain * interval.low
            try:
                found, states = least_sum(self.relaxation, interval.high, cutoff_s, self.budget.states - self.states)
            except SearchTooLarge:
                return
            self.states += states
            heapq.heappop(self.unresolved)
            if found is not None:
                self._offer(found.cost, found)
                high = found.cost.bottleneck_s * (1 - TOLERANCE)
                if interval.low < high:
                    bound = found.cost.sum_s + gain * interval.low
                    heapq.heappush(self.unresolved, Interval(bound, interval.low, high, found.cost.sum_s))
