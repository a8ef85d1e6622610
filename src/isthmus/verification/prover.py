"""A lower bound on the step of any plan, raised for as long as it may work: anytime.

Every number of micro-batches that a plan may choose has two parts, one replica and several; the lowest part is the
bound, and is worked on next. Plans are not looked for: the goal is what a known plan takes, or a bound to be proven.
Where pipelines are searched, one below the goal may be come upon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from isthmus.verification.bound import NEVER, Bounds
from isthmus.verification.closed_form import Setup
from isthmus.verification.device_sets import DeviceKinds
from isthmus.verification.one_replica import OneReplica
from isthmus.verification.pipelines import Goal, SearchedPipelines
from isthmus.verification.priced_replicas import PricedReplicas
from isthmus.verification.question import Question
from isthmus.verification.reading import GraphReading
from isthmus.verification.several_replicas import SeveralReplicas
from isthmus.verification.stage_arrays import stage_arrays
from isthmus.verification.walks import Walks, ample_bytes, walkable

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
