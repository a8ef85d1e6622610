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
from isthmus.verification.device_sets import INFINITE, DeviceKinds
from isthmus.verification.one_replica import OneReplica
from isthmus.verification.question import Question
from isthmus.verification.reading import GraphReading
from isthmus.verification.several_replicas import SeveralReplicas
from isthmus.verification.stage_arrays import stage_arrays
from isthmus.verification.suffixes import SearchedPipelines
from isthmus.verification.walks import Walks, ample_bytes, walkable

MOST_STATES = 4096
"""Of one replica: sets of devices that are distinguished."""
MOST_SETS = 512
"""Of several."""
SLICE = 100_000_000
"""Work of the first try of a part."""
SETTLED = 1.0005
"""Ratio of a limit that could not be proven to one that was, below which no limit between them is tried."""


class ProofProgress(NamedTuple):
    """What is proven."""

    bound_s: float
    work: int
    open: str
    """The part of all plans that is lowest, in words."""


Ended = Callable[[int], bool]
"""Whether to end, after so much work."""


class BoundPart:
    """One replica, or several, of one number of micro-batches. This one is bounded without a search."""

    def __init__(self, bound_s: float, words: str) -> None:
        self.bound_s, self.words, self.stuck = bound_s, words, True
        """`stuck`: nothing raises the bound."""

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
    def __init__(self, searches: Sequence[SeveralReplicas], goal_s: float, simple: BoundPart) -> None:
        """Each search may prove a limit by itself; the quickest first."""
        super().__init__(simple.bound_s, simple.words)
        self._searches, self.stuck = searches, False
        self._goal_s = self._above_s = self._next_s = goal_s

    def aim(self) -> None:
        self._next_s = self._goal_s

    def advance(self, ended: Callable[[], bool]) -> None:
        """The goal first. Then a limit between what is proven and what could not be; with finer intervals once these
        meet."""
        limit_s = self._next_s
        if any(search.proven(limit_s, ended) for search in self._searches):
            self.bound_s = limit_s
        elif not ended():
            self._above_s = limit_s
        easier = self.bound_s < limit_s < self._above_s
        self._next_s = (self.bound_s * (limit_s if easier else self._above_s)) ** 0.5
        if self._above_s <= self.bound_s * SETTLED and not ended():
            refined = [search.refine() for search in self._searches]
            self.stuck = self.bound_s >= self._goal_s or not any(refined)
            self._above_s = self._next_s = self._goal_s


class BoundParts:
    """All plans with one number of micro-batches: of one replica, and of several."""

    def __init__(self, reading: GraphReading, goal_s: float) -> None:
        question, bounds = reading.question, Bounds(reading)
        count, words = question.micro_batches, f"of {question.micro_batches} micro-batches"
        holders = question.constraints.data_holders
        alone = len(holders or question.fleet.names) == 1 or reading.not_summed is not None
        self.single = BoundPart(bounds.single_s(), f"one replica {words}")
        self.several = BoundPart(NEVER if alone else bounds.several_s(), f"several replicas {words}")
        self._walks: list[Walks] = []
        self.pipelines: SearchedPipelines | None = None
        if walkable(reading):
            arrays = stage_arrays(reading)
            ample = ample_bytes(arrays, count)
            rough, kinds = DeviceKinds(question, ample, rooms=False), DeviceKinds(question, ample)
            several_kinds = [rough, kinds] if len(rough.all) < len(kinds.all) else [kinds]
            self._walks = [Walks(arrays, each, question) for each in several_kinds]
            ones = [OneReplica(w, count, goal_s, MOST_STATES) for w in self._walks[:-1]]
            self.pipelines = SearchedPipelines(reading, self._walks[-1])
            ones.append(OneReplica(self._walks[-1], count, goal_s, MOST_STATES, self.pipelines))
            self.single = _One(ones, self.single)
            if not alone and self.several.bound_s < goal_s:
                searches = [SeveralReplicas(w, count, bounds.averaging_s(2), MOST_SETS) for w in self._walks]
                self.several = _Several(searches, goal_s, self.several)

    @property
    def all(self) -> list[BoundPart]:
        return [self.single, self.several]

    @property
    def work(self) -> int:
        return sum(walks.work for walks in self._walks)


class Prover:
    """The bound over all numbers of micro-batches of the question. `goal_s` need not be exceeded."""

    def __init__(self, question: Question, goal_s: float) -> None:
        self._goal_s = goal_s
        self._counts = [
            BoundParts(GraphReading(question if n == question.micro_batches else question.cut_into(n)), goal_s)
            for n in question.counts
        ]

    @property
    def work(self) -> int:
        return sum(parts.work for parts in self._counts)

    @property
    def lowest(self) -> BoundPart:
        """The part that bounds lowest."""
        return min((part for parts in self._counts for part in parts.all), key=lambda part: part.bound_s)

    @property
    def pipeline(self) -> Setup | None:
        """The fastest that was timed below the goal; None: none was."""
        found = [p.pipelines.best for p in self._counts if p.pipelines is not None and p.pipelines.best is not None]
        step_s, setup = min(found, default=(INFINITE, None))
        return setup if step_s < self._goal_s else None

    def run(self, ended: Ended, tell: Callable[[ProofProgress], None] = lambda _: None) -> float:
        """The bound in seconds: the goal, or what is proven when nothing more can be, or when it is ended."""
        reported_s = 0.0
        while self.lowest.bound_s < self._goal_s and not self.lowest.stuck and not ended(self.work):
            # A part may use as much as was used so far: none takes all that there is.
            until = 2 * self.work + SLICE
            self.lowest.advance(lambda until=until: self.work > until or ended(self.work))
            if self.lowest.bound_s > reported_s:
                reported_s = min(self.lowest.bound_s, self._goal_s)
                tell(ProofProgress(reported_s, self.work, self.lowest.words))
        return min(self.lowest.bound_s, self._goal_s)
