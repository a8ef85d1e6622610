"""A lower bound on the step of any plan, raised for as long as it may work: anytime.

Every number of micro-batches that a plan may choose has two parts, one replica and several; the lowest part is the
bound, and is worked on next. Plans are not looked for: the goal is what a known plan takes, or a bound to be proven.
Where pipelines are searched, one below the goal may be come upon.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from isthmus.verification.bound import NEVER, Bounds
from isthmus.verification.closed_form import Setup
from isthmus.verification.device_sets import INFINITE, DeviceKinds, Tracked
from isthmus.verification.one_replica import OneReplica
from isthmus.verification.pipelines import Goal, SearchedPipelines
from isthmus.verification.question import Question
from isthmus.verification.reading import GraphReading
from isthmus.verification.replica_search import WHOLE
from isthmus.verification.several_replicas import SeveralReplicas
from isthmus.verification.stage_arrays import Floats, stage_arrays
from isthmus.verification.walks import NARROW, Terms, Walks, ample_bytes, walkable

MOST_STATES = 4096  # sets of devices that are distinguished for one replica
MOST_SETS = 512  # sets of devices that are distinguished for several replicas
SLICE = 100_000_000  # work of the first try of a part
FINE, FINEST = 0.004, 0.0002
"""Relative widths below which intervals are not divided, at first and at last: what is open then stays open."""
RISE = 1.2  # ratio of the next limit to what is proven, at most: a goal far above it is not proven at once
EASIER = 3  # limits that are tried for a while each
SETTLED = 1.0005
"""Ratio of a limit that could not be proven to one that was, below which no limit between them is tried."""


class ProofProgress(NamedTuple):
    bound_s: float
    work: int
    open: str  # the part of all plans that is lowest, in words


Ended = Callable[[int], bool]  # whether to end, after so much work


class BoundPart:
    """One replica, or several, of one number of micro-batches. This one is bounded without a search."""

    def __init__(self, bound_s: float, words: str) -> None:
        self.bound_s, self.words, self.stuck = bound_s, words, True  # `stuck`: nothing raises the bound

    def aim(self) -> None:
        """At the goal again, whatever was tried meanwhile."""

    def advance(self, ended: Callable[[], bool]) -> None:
        """Raises the bound if it can."""


class _One(BoundPart):
    def __init__(self, searches: Sequence[OneReplica], simple: BoundPart) -> None:
        super().__init__(simple.bound_s, simple.words)
        self._searches, self.stuck = searches, False

    def advance(self, ended: Callable[[], bool]) -> None:
        for search in self._searches:
            self.bound_s = max(self.bound_s, search.run(ended))
        self.stuck = not ended()


class _Several(BoundPart):
    """So many replicas, one of the ranges of the searches."""

    def __init__(
        self,
        searches: Sequence[SeveralReplicas],
        priced: PricedReplicas | None,
        replicas: tuple[int, int],
        goal: Goal,
        simple: BoundPart,
    ) -> None:
        """`priced` bounds them first. Each search may prove a limit by itself; the quickest first."""
        super().__init__(simple.bound_s, simple.words)
        self._searches, self._replicas, self._goal, self.stuck = searches, replicas, goal, False
        self._above_s = self._next_s = goal.step_s
        self._fine, self._easier, self._refuted = FINE, 0, False
        self._priced, self._in_steps = priced, simple.bound_s > 0

    def aim(self) -> None:
        self._next_s, self._in_steps = self._goal.step_s, False

    def advance(self, ended: Callable[[], bool]) -> None:
        """Prices first. Then the goal, or a step towards it; limits halfway to what is proven; and the goal again: what
        is proven of choices is kept. Below a limit that could not be proven in any time intervals are finer, once what
        is proven meets it."""
        goal_s = self._goal.step_s
        self.stuck = self.bound_s >= goal_s
        if self.stuck:
            return
        if self._priced is not None:
            sums_s = self._searches[-1].least_sums_s(*self._replicas)
            time_s, more = self._priced.raised(self._replicas, goal_s - sums_s, ended)
            self.bound_s = max(self.bound_s, sums_s + time_s)
            if not more:
                self._priced = None
            return
        limit_s = min(self._next_s, goal_s)
        if self._in_steps:
            limit_s = min(limit_s, self.bound_s * RISE)
        if any(search.proven(limit_s, self._replicas, self._fine, ended) for search in self._searches):
            self.bound_s, self._easier = max(self.bound_s, limit_s), 0
        elif self._goal.step_s < goal_s:  # a plan was come upon
            self._above_s = self._next_s = self._goal.step_s
            return
        elif not ended():
            self._above_s, self._easier, self._refuted = limit_s, 0, True
        else:
            self._easier = (self._easier + 1) % EASIER
        if self._refuted or self._easier:
            self._next_s = (self.bound_s * (limit_s if self._easier else self._above_s)) ** 0.5
        else:
            self._next_s = goal_s
        if self._above_s <= self.bound_s * SETTLED and not ended():
            self._fine, self._refuted = self._fine / 4, False
            self.stuck = self.bound_s >= goal_s or self._fine < FINEST
            self._above_s = self._next_s = goal_s


class BoundParts:
    """All plans with one number of micro-batches: of one replica, and of several."""

    def __init__(self, reading: GraphReading, goal: Goal) -> None:
        question, bounds = reading.question, Bounds(reading)
        count, words = question.micro_batches, f"of {question.micro_batches} micro-batches"
        holders = question.constraints.data_holders
        alone = len(holders or question.fleet.names) == 1 or reading.not_summed is not None
        self.single = BoundPart(bounds.single_s(), f"one replica {words}")
        self.several = [BoundPart(NEVER if alone else bounds.several_s(), f"several replicas {words}")]
        self._walks: list[Walks] = []
        if walkable(reading):
            arrays = stage_arrays(reading)
            ample = ample_bytes(arrays, count)
            rough, kinds = DeviceKinds(question, ample, rooms=False), DeviceKinds(question, ample)
            several_kinds = [rough, kinds] if len(rough.all) < len(kinds.all) else [kinds]
            self._walks = [Walks(arrays, each, question) for each in several_kinds]
            ones = [OneReplica(w, count, goal, MOST_STATES) for w in self._walks[:-1]]
            pipelines = SearchedPipelines(reading, self._walks[-1], goal)
            ones.append(OneReplica(self._walks[-1], count, goal, MOST_STATES, pipelines))
            self.single = _One(ones, self.single)
            simple = self.several[0]
            if not alone and simple.bound_s < goal.step_s:
                self.several = self._several_parts(bounds, pipelines, goal, simple.words)

    def _several_parts(self, bounds: Bounds, pipelines: SearchedPipelines, goal: Goal, words: str) -> list[BoundPart]:
        """One for each range of numbers of replicas."""
        least_s, count, last = bounds.averaging_s(2), pipelines.question.micro_batches, self._walks[-1]
        searches = [SeveralReplicas(w, count, least_s, MOST_SETS) for w in self._walks[:-1]]
        searches.append(SeveralReplicas(last, count, least_s, MOST_SETS, pipelines))
        priced = None if searches[-1].tracks_all else PricedReplicas(last, count, goal.step_s)
        found = list[BoundPart]()
        for fewest, most in searches[-1].ranges:
            bound_s = max(bounds.several_s(fewest, most), searches[-1].least_sums_s(fewest, most))
            number = str(fewest) if most == fewest else f"{fewest}-{most}"
            simple = BoundPart(bound_s, words.replace("several", number))
            found.append(_Several(searches, priced, (fewest, most), goal, simple))
        return found

    @property
    def all(self) -> list[BoundPart]:
        return [self.single, *self.several]

    @property
    def several_s(self) -> float:
        """The bound of several replicas, however many."""
        return min((part.bound_s for part in self.several), default=NEVER)

    @property
    def work(self) -> int:
        return sum(walks.work for walks in self._walks)


class Prover:
    """The bound over all numbers of micro-batches of the question. `goal_s` need not be exceeded."""

    def __init__(self, question: Question, goal_s: float) -> None:
        self._goal = Goal(goal_s)
        self._counts = [
            BoundParts(GraphReading(question if n == question.micro_batches else question.cut_into(n)), self._goal)
            for n in question.counts
        ]

    @property
    def work(self) -> int:
        return sum(parts.work for parts in self._counts)

    @property
    def lowest(self) -> BoundPart:
        return min((part for parts in self._counts for part in parts.all), key=lambda part: part.bound_s)

    @property
    def found(self) -> tuple[Setup, ...]:
        """The replicas of the fastest plan below the goal that was come upon; none where there was none."""
        return self._goal.found

    @property
    def _open(self) -> int:
        """Parts that are below the goal."""
        return sum(part.bound_s < self._goal.step_s for parts in self._counts for part in parts.all)

    def run(self, ended: Ended, tell: Callable[[ProofProgress], None] = lambda _: None) -> float:
        """The bound in seconds: the goal, or what is proven when nothing more can be, or when it is ended."""
        reported_s, goal = 0.0, self._goal
        while self.lowest.bound_s < goal.step_s and not self.lowest.stuck and not ended(self.work):
            # A part may use its share of what was used so far once more: none takes all that there is.
            until = self.work + max(SLICE, self.work // max(1, self._open))
            self.lowest.advance(lambda until=until: self.work > until or ended(self.work))
            if self.lowest.bound_s > reported_s:
                reported_s = min(self.lowest.bound_s, goal.step_s)
                tell(ProofProgress(reported_s, self.work, self.lowest.words))
        return min(self.lowest.bound_s, goal.step_s)


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
