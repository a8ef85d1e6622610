"""The best plan below a limit, by branch and bound over all of them: an answer, or none within a fixed amount of work.

A pipeline grows stage by stage. What it takes at least is what its stages compute, what neighbours send each other, and
what is left on the fastest and on all devices left; a pipeline that reaches the limit is not continued. Several
replicas: a pipeline counts for as many micro-batches as it ends below the limit, and disjoint ones must come to all of
them together. Where money counts, each set of devices is searched on its own: what it costs by the hour says how long
a step on all of it may last.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from isthmus.verification.bound import Bounds
from isthmus.verification.closed_form import ClosedForm, Setup
from isthmus.verification.packing import wire_bytes
from isthmus.verification.price import SECONDS_PER_HOUR
from isthmus.verification.question import CLOSE
from isthmus.verification.reading import GraphReading
from isthmus.verification.timing import PipelineCheck

MOST_DEVICES = 6
MOST_GROWN = 400_000  # stages looked at
MOST_TIMED = 120_000  # pipelines timed, each with some number of micro-batches, and choices of several


class OutOfWork(Exception):
    """The search ended before its answer."""


class SearchResult(NamedTuple):
    """The bound of all plans in the search, and the best of them; infinite where none is below the limit."""

    bound: float
    known: float


class _Crossing(NamedTuple):
    """A value at a boundary: the block that makes it, the first behind the boundary that takes it, and the first of
    those that send a gradient back."""

    home: int
    use: int
    returns: float
    size_bytes: int


class _Grown(NamedTuple):
    devices: tuple[str, ...]
    starts: tuple[int, ...]  # in blocks
    end: int
    spent_s: float
    slowest_s: float


class _Ending(NamedTuple):
    """A pipeline, and how many micro-batches it ends below the limit."""

    ended: int
    setup: Setup
    pipeline: PipelineCheck


class _Scope(NamedTuple):
    """Where plans are looked for."""

    names: tuple[str, ...]
    whole: bool  # whether all of them are used
    second: float  # the objective per second of a step: 1, or the price of the devices
    longest_s: float  # the longest step that the terms allow


class PlanSearch:
    """Raises OutOfWork, here and later, for what is too much: counts, so that the answer is the same everywhere."""

    def __init__(self, reading: GraphReading, *, priced: bool, effort: float = 1.0) -> None:
        if len(reading.question.fleet.names) > MOST_DEVICES:
            raise OutOfWork
        self._form = ClosedForm(reading, priced=priced, least=True)
        self._at_most = ClosedForm(reading, priced=priced)
        self._reading, self._bounds, self._effort = reading, Bounds(reading), effort
        question = reading.question
        self._fleet, self._micro_batches = question.fleet, question.micro_batches
        self._speed = {name: question.flops_per_s(name) for name in question.fleet.names}
        self._edges = (0, *reading.places, len(reading.operators))
        self._first_sum_s = cache(lambda end: self._form.first_sum_s(self._edges[end]))
        self._work = [reading.work[0][edge] + reading.work[1][edge] for edge in self._edges]
        self._returns_home = reading.labels_from is not None
        self._crossing = self._crossings()
        self._grown = self._timed = 0
        self._below = self._known = math.inf
        self._scope = _Scope(question.fleet.names, False, 1.0, math.inf)

    def _crossings(self) -> list[list[_Crossing]]:
        starts = self._edges[:-1]

        def block(position: int) -> int:
            return bisect.bisect_right(starts, position) - 1

        found: list[list[_Crossing]] = [[] for _ in starts]
        for value in self._reading.values:
            home, uses = block(value.made), sorted({block(position) for position in value.uses})
            returns = sorted({block(position) for position in value.returns})
            for boundary in range(home + 1, uses[-1] + 1):
                use = next(u for u in uses if u >= boundary)
                back = next((r for r in returns if r >= boundary), math.inf)
                found[boundary].append(_Crossing(home, use, back, wire_bytes(self._reading.question, value)))
        return found

    def single(self, below: float) -> SearchResult:
        """The least of all plans of one replica, if it is below the limit. Raises OutOfWork."""
        self._below, self._known = below, math.inf
        for _ in self._scopes(1):
            for grown in self._pipelines(several=False):
                self._spend()
                setup = Setup(grown.devices, tuple(self._edges[b] for b in grown.starts), self._micro_batches)
                pipeline = self._form.pipeline(setup)
                if pipeline is not None:
                    self._try([pipeline], [self._micro_batches], [setup])
        return self._found(below)

    def several(self, below: float) -> SearchResult:
        """Return the same as `single`, of two replicas and more."""
        self._below, self._known = below, math.inf
        for scope in self._scopes(2):
            limit_s = self._limit_s() - self._bounds.averaging_s(2)
            ends: dict[frozenset[str], list[_Ending]] = {}
            for grown in self._pipelines(several=True):
                setup = Setup(grown.devices, tuple(self._edges[b] for b in grown.starts), 1)
                pipeline = self._form.pipeline(setup)
                count = 0 if pipeline is None else self._ended(pipeline, limit_s)
                if pipeline is not None and count:
                    ends.setdefault(frozenset(grown.devices), []).append(_Ending(count, setup, pipeline))
            for groups in self._groupings(ends, scope):
                for chosen in self._choices([ends[group] for group in groups]):
                    self._try_orders(chosen)
        return self._found(below)

    def _found(self, below: float) -> SearchResult:
        return SearchResult(self._below, self._known) if self._below < below else SearchResult(math.inf, self._known)

    def _try(self, replicas: Sequence[PipelineCheck], shares: Sequence[int], setups: Sequence[Setup]) -> None:
        value = self._form.of(replicas, shares, self._below)
        if value >= self._below:
            return
        self._below = value
        exact = self._form.is_exact(several=len(replicas) > 1)
        shared = [setup._replace(micro_batches=share) for setup, share in zip(setups, shares, strict=True)]
        self._known = min(self._known, value if exact else self._at_most.judged(shared))

    def _try_orders(self, chosen: Sequence[_Ending]) -> None:
        """Replicas in every order: what a sum takes depends on who is counted first."""
        self._spend()
        shares, slowest_s = self._shared_out([ending.pipeline for ending in chosen])
        if slowest_s + self._bounds.averaging_s(len(chosen)) >= self._limit_s():
            return
        for order in itertools.permutations(range(len(chosen))):
            self._spend()
            self._try([chosen[k].pipeline for k in order], [shares[k] for k in order], [chosen[k].setup for k in order])

    def _scopes(self, fewest: int) -> Iterator[_Scope]:
        """All devices; where money counts, each set of them that may do better than what was found."""
        question = self._reading.question
        constraints, priced = question.constraints, self._form.priced
        whole = priced or constraints.max_price is not None
        sizes = range(fewest, len(self._fleet.names) + 1) if whole else ()
        sets = [names for size in sizes for names in itertools.combinations(self._fleet.names, size)]
        for names in sets or [self._fleet.names]:
            second = self._form.hourly(set(names)) / SECONDS_PER_HOUR
            longest_s = math.inf if constraints.max_step_s is None else constraints.max_step_s * (1 + CLOSE)
            if constraints.max_price is not None and second:
                longest_s = min(longest_s, constraints.max_price * (1 + CLOSE) / 1000 / second)
            self._scope = _Scope(names, whole, second if priced else 1.0, longest_s)
            bounds = Bounds(self._reading, self._fleet.subset(names)) if whole else self._bounds
            least_s = bounds.single_s() if fewest == 1 else bounds.several_s()
            if least_s < self._limit_s():
                yield self._scope

    def _limit_s(self) -> float:
        """Return how long a step in this scope lasts at most, to be below the limit."""
        scope = self._scope
        return min(self._below / scope.second if scope.second else math.inf, math.nextafter(scope.longest_s, math.inf))

    def _spend(self) -> None:
        self._timed += 1
        if self._timed > self._effort * MOST_TIMED:
            raise OutOfWork

    def _ended(self, pipeline: PipelineCheck, below_s: float) -> int:
        """Return how many micro-batches it ends below the limit, of all but one."""
        low, high = 0, self._micro_batches
        while high - low > 1:
            self._spend()
            middle = (low + high) // 2
            low, high = (middle, high) if pipeline.step_s(middle, below_s) < below_s else (low, middle)
        return low

    def _groupings(self, ends: dict[frozenset[str], list[_Ending]], scope: _Scope) -> Iterator[list[frozenset[str]]]:
        """Disjoint sets of devices, two at least, whose best pipelines come to all micro-batches together."""
        most = {group: max(ending.ended for ending in rows) for group, rows in ends.items()}
        groups = list(ends)

        def extend(chosen: list[frozenset[str]], at: int) -> Iterator[list[frozenset[str]]]:
            covered = not scope.whole or sum(map(len, chosen)) == len(scope.names)
            together = sum(most[group] for group in chosen)
            if covered and 1 < len(chosen) <= self._micro_batches and together >= self._micro_batches:
                yield chosen
            for number in range(at, len(groups)):
                if all(groups[number].isdisjoint(other) for other in chosen):
                    yield from extend([*chosen, groups[number]], number + 1)

        return extend([], 0)

    def _choices(self, rows: Sequence[list[_Ending]]) -> Iterator[tuple[_Ending, ...]]:
        """One pipeline of each set, that come to all micro-batches together."""
        ordered = [sorted(group, key=lambda ending: -ending.ended) for group in rows]
        most = [group[0].ended for group in ordered]

        def extend(chosen: tuple[_Ending, ...], ended: int) -> Iterator[tuple[_Ending, ...]]:
            if len(chosen) == len(ordered):
                yield chosen
                return
            rest = sum(most[len(chosen) + 1 :])
            for ending in ordered[len(chosen)]:
                if ended + ending.ended + rest < self._micro_batches:
                    return
                yield from extend((*chosen, ending), ended + ending.ended)

        return extend((), 0)

    def _shared_out(self, chosen: Sequence[PipelineCheck]) -> tuple[list[int], float]:
        """Give each micro-batch to the replica that ends it soonest; and when the last replica ends."""
        shares = [1] * len(chosen)
        ahead = [(pipeline.step_s(2), k) for k, pipeline in enumerate(chosen)]
        heapq.heapify(ahead)
        for _ in range(self._micro_batches - len(chosen)):
            _, soonest = ahead[0]
            shares[soonest] += 1
            heapq.heapreplace(ahead, (chosen[soonest].step_s(shares[soonest] + 1), soonest))
        return shares, max(pipeline.step_s(share) for pipeline, share in zip(chosen, shares, strict=True))

    def _pipelines(self, *, several: bool) -> Iterator[_Grown]:
        """Whole pipelines that do not reach the limit by what they take at least; with all micro-batches, or with as
        many as several replicas leave to one."""
        yield from self._extended(_Grown((), (), 0, 0.0, 0.0), several)

    def _extended(self, before: _Grown, several: bool) -> Iterator[_Grown]:
        unused = [name for name in self._scope.names if name not in before.devices]
        again = before.devices[:1] if self._returns_home and len(before.devices) > 1 else ()
        all_of_them = self._scope.whole and not several
        for name in (*unused, *again):
            home = name in before.devices
            left = [other for other in unused if other != name] if not home else []
            if all_of_them and home and unused:
                continue
            needed = len(left) if all_of_them else 0
            if self._returns_home and not home:
                left += [*before.devices[:1], *([] if before.devices else [name])]
            least = self._needed(left) if several else self._micro_batches
            for end in range(before.end + 1, len(self._edges) - needed):
                self._grown += 1
                if self._grown > self._effort * MOST_GROWN:
                    raise OutOfWork
                grown = self._with(before, name, end)
                if self._at_least(grown, before.end, (name, *left), least) >= self._limit_s():
                    break  # a longer stage takes no less: what is left for others is no slower on this device
                if end == len(self._edges) - 1:
                    yield grown
                elif left and self._at_least(grown, end, left, least) < self._limit_s():
                    yield from self._extended(grown, several)

    def _with(self, before: _Grown, name: str, end: int) -> _Grown:
        start = before.end
        compute_s = (self._work[end] - self._work[start]) / self._speed[name]
        spent_s, slowest_s = before.spent_s + compute_s, max(before.slowest_s, compute_s)
        if not before.devices:
            spent_s += self._first_sum_s(end)
        else:
            earlier, source = before.starts[-1], before.devices[-1]
            near = [c for c in self._crossing[start] if c.home >= earlier and c.use < end]
            back_bytes = sum(c.size_bytes for c in near if c.returns < end)
            for ends, size in (((source, name), sum(c.size_bytes for c in near)), ((name, source), back_bytes)):
                if size and source != name:
                    link = self._fleet.link(*ends)
                    busy_s = size / link.bandwidth_bytes_per_s
                    spent_s, slowest_s = spent_s + link.latency_s + busy_s, max(slowest_s, busy_s)
        return _Grown((*before.devices, name), (*before.starts, start), end, spent_s, slowest_s)

    def _at_least(self, grown: _Grown, since: int, left: Sequence[str], micro_batches: int) -> float:
        """Seconds of so many micro-batches, where `left` run the blocks from `since` on."""
        speeds = [self._speed[name] for name in left]
        spent_s = grown.spent_s + (self._work[-1] - self._work[grown.end]) / max(speeds)
        slowest_s = max(grown.slowest_s, (self._work[-1] - self._work[since]) / sum(speeds))
        return spent_s + (micro_batches - 1) * slowest_s

    def _needed(self, left: Sequence[str]) -> int:
        """Micro-batches that are left to a replica however well the devices beside it do."""
        if not self._bounds.work:
            return 1
        others = len(left) // self._bounds.fewest
        others += self._limit_s() * sum(self._speed[n] for n in left) / self._bounds.work
        return max(1, self._micro_batches - math.floor(others + 1e-9)) if others < self._micro_batches else 1
