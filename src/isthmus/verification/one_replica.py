"""A bound of all pipelines of one replica: walks under thresholds, and intervals between them.

A step takes `fill + (n - 1) * period`. Let F(B) be the least fill of a walk whose period is at most B. A pipeline with
a period in (low, high] takes at least F(high) + (n - 1) low. The interval that bounds lowest is looked into first: its
walk says where it may be divided. A walk that uses a device twice is no pipeline: then that device's kind is tracked.

Devices that no link joins within a threshold are apart: a pipeline is among some of them. Each of these is a case for
itself, with fewer devices to track. Where nothing of this raises the bound, pipelines are searched.

The fastest pipelines of an interval of periods, by branch and bound: stage by stage, from the last to the first.

A suffix of a pipeline is known with its devices: what its stages compute, what they send each other, and how long a
micro-batch is away from each of them. The blocks before it take at least what the relaxation says (`walks`: F), with
no more devices of a kind than the suffix leaves:

    step >= suffix + F[left, kind, start] + message(kind, first of the suffix) + (n - 1) max(low, period of the suffix)

What the suffix receives from before the stage just before it comes over the best link, until that stage is known too.
The suffix with the lowest bound is continued first, so the lowest is the bound of the interval. Whole pipelines are
timed by the closed form.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from isthmus.verification.device_sets import INFINITE, Tracked, grown, set_count
from isthmus.verification.pipelines import Goal, Joined, PipelineStage, SearchedPipelines
from isthmus.verification.sent import Floats, Ints
from isthmus.verification.walks import EACH, SLACK, Terms, Walks

MOST_OPEN = 600_000  # suffixes of one interval
MOST_PRICINGS = 30
FIRST_RATE = 1.0
MOST_WORSE = 3  # prices in a row that bound no higher, after which steps are halved


class Suffix(NamedTuple):
    """The last stages of a pipeline."""

    bound_s: float
    start: int
    number: int
    stages: tuple[PipelineStage, ...] = ()
    spent_s: float = 0.0  # seconds of one micro-batch, and of parameters that its stages share
    period_s: float = 0.0
    left: int = 0  # state of the tracked kinds' devices that are not used
    timed: bool = False  # it is a pipeline, and the bound is what it takes


class _Grown(NamedTuple):
    """Suffixes with one stage more: [recomputed, kind, start]."""

    spent_s: Floats
    far_s: Floats  # [start]
    period_s: Floats
    trip_s: Floats


class SuffixSearch:
    """Pipelines with a period from `low` to the terms' threshold."""

    def __init__(self, pipelines: SearchedPipelines, tracked: Tracked, terms: Terms, low: float, goal_s: float) -> None:
        self._pipelines, self._walks, self._terms = pipelines, pipelines.walks, terms
        self._later, self._goal_s, self._limit_s = terms.more_than, goal_s, terms.threshold_s * SLACK
        kinds = self._walks.kinds
        self._counts = kinds.counts
        self._stride = np.zeros(len(kinds.all), dtype=np.int64)
        self._stride[list(tracked.kinds)] = tracked.strides
        self._stages_by_end()
        self._prices_s = self._priced(low)
        self._prefixes(tracked)
        self._fronts: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}
        self._number = itertools.count()
        self._open = [Suffix(0.0, self._walks.arrays.blocks, 0, (), 0.0, low, tracked.size - 1)]
        self.done = False  # nothing raises the bound

    @property
    def bound_s(self) -> float:
        return min(self._goal_s, self._open[0].bound_s) if self._open else self._goal_s

    def run(self, limit_s: float, ended: Callable[[], bool]) -> None:
        """Until the bound is above the limit."""
        while not self.done and self._open and self._open[0].bound_s <= limit_s and not ended():
            suffix = self._open[0]
            if suffix.timed or len(self._open) > MOST_OPEN:
                self.done = True
                return
            heapq.heappop(self._open)
            if suffix.start:
                self._continue(suffix)
                continue
            step_s = max(suffix.bound_s, self._pipelines.step_s([suffix.stages]))
            if step_s < self._goal_s:
                heapq.heappush(self._open, suffix._replace(bound_s=step_s, timed=True))

    def _stages_by_end(self) -> None:
        """Fill in for each end [recomputed, kind, start]: seconds of compute, infinite where no such stage may be; and
        one divided by the micro-batches that a stage holds, where these are not all."""
        walks, terms = self._walks, self._terms
        blocks = walks.arrays.blocks
        options, inverse = walks.options(terms, walks.stages(terms), terms.more_than + 1)
        if len(options) > 1 and not np.isfinite(options[1]).any():
            options, inverse = options[:1], inverse[:1]
        self._compute_s, self._inverse, self._lowest = list[Floats](), list[Floats](), list[int]()
        for end in range(blocks + 1):
            starts = np.arange(end)
            compute_s, over = (np.array([x[:, starts, end - 1 - starts] for x in each]) for each in (options, inverse))
            some = np.flatnonzero(np.isfinite(compute_s).any(axis=(0, 1)))
            lowest = int(some[0]) if len(some) else end
            self._lowest.append(lowest)
            self._compute_s.append(compute_s[..., lowest:])
            self._inverse.append(over[..., lowest:] * (end < blocks))
        self._held_up = any(bool(x.any()) for x in self._inverse)

    def _priced(self, low: float) -> Floats:
        """[kind]: seconds that a walk pays for each device of it, and gets back for each that there is. Raised for
        kinds of which the fastest walk has more than there are (subgradients: Held and Karp 1971)."""
        walks, counts, tracked = self._walks, self._counts, Tracked(self._walks.kinds, ())
        stages, prices_s = walks.stages(self._terms), np.zeros(len(counts))
        best_s, best_prices_s, rate, since = -INFINITE, prices_s, FIRST_RATE, 0
        enough_s = self._goal_s - self._later * low
        for _ in range(MOST_PRICINGS):
            terms = replace(self._terms, prices_s=prices_s)
            found = walks.solve(tracked, terms, stages)
            fill_s = float(found[..., -1].min()) - float(prices_s @ counts)
            if fill_s == INFINITE:
                break
            since += 1
            if fill_s > best_s:
                best_s, best_prices_s, since = fill_s, prices_s, 0
            walk = Counter(walks.follow(tracked, terms, found, stages).kinds)
            over = np.array([walk[kind] for kind in range(len(counts))]) - counts
            over = np.where((over > 0) | (prices_s > 0), over, 0)
            if fill_s >= enough_s or not over.any():
                break
            rate = rate / 2 if since >= MOST_WORSE else rate
            since = since % MOST_WORSE
            prices_s = np.maximum(0.0, prices_s + rate * (enough_s - fill_s) / (over @ over) * over)
        return best_prices_s

    def _prefixes(self, tracked: Tracked) -> None:
        """Bound the time of the blocks before a stage: with devices that a suffix leaves, and by end with any."""
        walks, terms = self._walks, replace(self._terms, prices_s=self._prices_s)
        blocks, count = walks.arrays.blocks, len(walks.kinds.all)
        found = walks.solve(tracked, terms, walks.stages(terms))
        classes, states = found.shape[:2]
        sizes = [int(walks.kinds.counts[kind]) + 1 for kind in tracked.kinds]
        grid = found.reshape(classes, *sizes, count, blocks + 1)
        for axis, size in enumerate(sizes):
            by_number = np.moveaxis(grid, 1 + axis, 0)
            for number in range(1, size):
                np.minimum(by_number[number], by_number[number - 1], out=by_number[number])
        self._before_s = np.ascontiguousarray(grid.reshape(classes, states, count, blocks + 1).transpose(3, 1, 0, 2))
        """[boundary, state, class, kind]"""
        self._least_s = [np.zeros((count, end - lowest)) for end, lowest in enumerate(self._lowest)]
        for start in range(1, blocks):
            width = blocks - start
            sent_s, busy_s, _ = walks.messages(start, width)
            sent_s = np.where(busy_s <= self._limit_s, sent_s, INFINITE)
            total = (self._before_s[start, -1][:, :, None, None] + sent_s).min(axis=(0, 1))
            for end in range(start + 1, blocks + 1):
                if start >= self._lowest[end]:
                    self._least_s[end][:, start - self._lowest[end]] = total[:, end - start - 1]

    def _continue(self, suffix: Suffix) -> None:
        """Put one stage before it, in every way."""
        if self._dominated(suffix):
            return
        end, stages, lowest = suffix.start, suffix.stages, self._lowest[suffix.start]
        grown = self._grown(suffix)
        used = Counter(stage.kind for stage in stages)
        used_up = [kind for kind, number in used.items() if number >= self._counts[kind]]
        partly_s = grown.spent_s + grown.far_s + self._later * grown.period_s
        partly_s[grown.period_s > self._limit_s] = INFINITE
        partly_s[:, used_up] = INFINITE
        # What devices that are left have paid is paid back, where there are stages before.
        paid_s = self._prices_s @ self._counts - sum(self._prices_s[stage.kind] for stage in stages) - self._prices_s
        before_s = self._least_s[end] - paid_s[:, None]
        if not lowest:
            partly_s[..., 0][:, ~self._pipelines.may_begin] = INFINITE
            before_s[:, 0] = 0.0
        self._walks.work += EACH + 4 * partly_s.size
        chosen = np.nonzero(partly_s + before_s < self._goal_s)
        if not len(chosen[0]):
            return
        again, kind, column = chosen
        start, left = column + lowest, suffix.left - self._stride[kind]
        sharper_s = self._before(start, end, kind, left, used_up)
        bound_s = partly_s[chosen] + np.where(start > 0, sharper_s - paid_s[kind], 0.0)
        figures = (again, kind, start, left, *(x[chosen] for x in (grown.spent_s, grown.period_s, grown.trip_s)))
        for bound, twice, own, begin, rest, spent, period, trip in zip(
            bound_s.tolist(), *(x.tolist() for x in figures), strict=True
        ):
            if bound < self._goal_s:
                more = (PipelineStage(own, begin, end, bool(twice), trip), *stages)
                at_least = max(bound, suffix.bound_s)
                heapq.heappush(self._open, Suffix(at_least, begin, next(self._number), more, spent, period, rest))

    def _grown(self, suffix: Suffix) -> _Grown:
        """Put every stage that ends where the suffix starts before it."""
        end, compute_s = suffix.start, self._compute_s[suffix.start]
        lowest = self._lowest[end]
        busy_s = np.where(np.isfinite(compute_s), compute_s, 0.0)
        begun = Joined(compute_s + suffix.spent_s, busy_s, np.zeros(compute_s.shape[-1]), np.zeros(compute_s.shape[1:]))
        among = slice(None), slice(lowest, None)
        spent_s, busy_s, far_s, home_s = self._pipelines.joined(suffix.stages, end, begun, among, trips=self._held_up)
        period_s, trip_s = np.maximum(busy_s, suffix.period_s), compute_s + home_s
        if self._held_up:
            few = self._inverse[end] > 0
            period_s[few] = np.maximum(period_s[few], trip_s[few] * self._inverse[end][few])
        return _Grown(spent_s, far_s, period_s, trip_s)

    def _before(self, start: Ints, end: int, kind: Ints, left: Ints, used_up: list[int]) -> Floats:
        """Return the least time of the blocks before such stages, with the messages to these."""
        if self._pipelines.messages is None:
            return self._least_s[end][kind, start - self._lowest[end]]
        sent_s, busy_s = (x[start, end - start - 1, kind] for x in self._pipelines.messages)
        before_s = self._before_s[start, left] + np.where(busy_s <= self._limit_s, sent_s, INFINITE)
        before_s[:, :, used_up] = INFINITE
        self._walks.work += EACH + before_s.size
        return before_s.min(axis=(1, 2))

    def _dominated(self, suffix: Suffix) -> bool:
        """Return whether the same devices run the same blocks in less time, with the same stage first."""
        stages, sent = suffix.stages, self._pipelines.sent
        if len(stages) < 2 or not self._pipelines.known:
            return False
        far = [stage[:3] for stage in stages[1:] if sent.received(stage.start, stage.end).first < suffix.start]
        # Round trips are exact where stages send to the next one alone.
        chain = all(sent.received(b.start, b.end).first >= a.start for a, b in itertools.pairwise(stages))
        if self._held_up and (far or not chain):
            return False
        used = tuple(sorted(stage.kind for stage in stages))
        front = self._fronts.setdefault((stages[0][:3], used, *far), [])
        own = suffix.spent_s, suffix.period_s, stages[0].trip_s if self._held_up else 0.0
        if any(a <= own[0] and b <= own[1] and c <= own[2] for a, b, c in front):
            return True
        front.append(own)
        return False


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
