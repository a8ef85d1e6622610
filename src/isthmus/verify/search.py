"""The best plan below a limit, by branch and bound over all of them: an answer, or none within a fixed amount of work.

A pipeline grows stage by stage. What it takes at least is what its stages compute, what neighbours send each other, and
what is left on the fastest and on all devices left; a pipeline that reaches the limit is not continued. Several
replicas: a pipeline counts for as many micro-batches as it ends below the limit, and disjoint ones must come to all of
them together.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from isthmus.verify.bound import Bounds
from isthmus.verify.closed_form import ClosedForm, Setup
from isthmus.verify.packing import wire_bytes
from isthmus.verify.price import SECONDS_PER_HOUR

MOST_DEVICES = 6
MOST_GROWN = 200_000
"""Stages looked at."""
MOST_TIMED = 30_000
"""Pipelines timed, each with some number of micro-batches, and choices of several."""


class OutOfWork(Exception):
    """The search ended before its answer."""


class _Crossing(NamedTuple):
    """A value at a boundary: the block that makes it, the first behind the boundary that takes it, and the first of
    those that send a gradient back."""

    home: int
    use: int
    returns: float
    size_bytes: int


class _Grown(NamedTuple):
    devices: tuple[str, ...]
    starts: tuple[int, ...]
    """In blocks."""
    end: int
    spent_s: float
    slowest_s: float


class Search:
    """Raises OutOfWork, here and later, for what is too much: counts, so that the answer is the same everywhere."""

    def __init__(self, form: ClosedForm, bounds: Bounds) -> None:
        if len(form.reading.question.fleet.names) > MOST_DEVICES:
            raise OutOfWork
        self._form, self._reading, self._bounds = form, form.reading, bounds
        question = form.reading.question
        self._fleet, self._micro_batches = question.fleet, question.micro_batches
        self._speed = {name: question.flops_per_s(name) for name in question.fleet.names}
        self._edges = (0, *form.reading.places, len(form.reading.operators))
        self._work = [form.reading.work[0][edge] + form.reading.work[1][edge] for edge in self._edges]
        self._returns_home = form.reading.labels_from is not None
        self._crossing = self._crossings()
        self._grown = self._timed = 0
        self._below = math.inf

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

    def single(self, below: float) -> float | None:
        """The least of all plans of one replica, if it is below the limit. Raises OutOfWork."""
        self._below = below
        for grown in self._pipelines(several=False):
            self._spend()
            setup = Setup(grown.devices, tuple(self._edges[b] for b in grown.starts), self._micro_batches)
            self._below = min(self._below, self._form.judged([setup], self._below))
        return self._below if self._below < below else None

    def several(self, below_s: float) -> float | None:
        """As `single`, of two replicas and more whose gradients are summed in each step."""
        self._below = below_s
        ends: dict[frozenset[str], list[tuple[int, Setup]]] = {}
        for grown in self._pipelines(several=True):
            setup = Setup(grown.devices, tuple(self._edges[b] for b in grown.starts), 1)
            count = self._ended(setup, below_s)
            if count:
                ends.setdefault(frozenset(grown.devices), []).append((count, setup))
        for groups in self._groupings(ends):
            for chosen in self._choices([ends[group] for group in groups]):
                for ordered in itertools.permutations(chosen):
                    self._spend()
                    self._below = min(self._below, self._form.judged(self._shared_out(ordered), self._below))
        return self._below if self._below < below_s else None

    def _spend(self) -> None:
        self._timed += 1
        if self._timed > MOST_TIMED:
            raise OutOfWork

    def _alone_s(self, setup: Setup, micro_batches: int, below_s: float = math.inf) -> float:
        self._spend()
        return self._form.alone_s(setup._replace(micro_batches=micro_batches), below_s)

    def _ended(self, setup: Setup, below_s: float) -> int:
        """How many micro-batches it ends below the limit, of all but one."""
        low, high = 0, self._micro_batches
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._alone_s(setup, middle, below_s) < below_s else (low, middle)
        return low

    def _groupings(self, ends: dict[frozenset[str], list[tuple[int, Setup]]]) -> Iterator[list[frozenset[str]]]:
        """Disjoint sets of devices, two at least, whose best pipelines come to all micro-batches together."""
        most = {group: max(count for count, _ in rows) for group, rows in ends.items()}
        groups = list(ends)

        def extend(chosen: list[frozenset[str]], at: int) -> Iterator[list[frozenset[str]]]:
            if 1 < len(chosen) <= self._micro_batches and sum(most[g] for g in chosen) >= self._micro_batches:
                yield chosen
            for number in range(at, len(groups)):
                if all(groups[number].isdisjoint(other) for other in chosen):
                    yield from extend([*chosen, groups[number]], number + 1)

        return extend([], 0)

    def _choices(self, rows: Sequence[list[tuple[int, Setup]]]) -> Iterator[tuple[Setup, ...]]:
        """One pipeline of each set, that come to all micro-batches together."""
        ordered = [sorted(group, key=lambda row: -row[0]) for group in rows]
        most = [group[0][0] for group in ordered]

        def extend(chosen: tuple[Setup, ...], ended: int) -> Iterator[tuple[Setup, ...]]:
            if len(chosen) == len(ordered):
                yield chosen
                return
            rest = sum(most[len(chosen) + 1 :])
            for count, setup in ordered[len(chosen)]:
                if ended + count + rest < self._micro_batches:
                    return
                yield from extend((*chosen, setup), ended + count)

        return extend((), 0)

    def _shared_out(self, chosen: Sequence[Setup]) -> list[Setup]:
        """Micro-batch after micro-batch to the replica that ends it soonest: the least slowest replica."""
        shares = [1] * len(chosen)
        ahead = [self._alone_s(setup, 2) for setup in chosen]
        for _ in range(self._micro_batches - len(chosen)):
            soonest = min(range(len(chosen)), key=ahead.__getitem__)
            shares[soonest] += 1
            ahead[soonest] = self._alone_s(chosen[soonest], shares[soonest] + 1)
        return [setup._replace(micro_batches=share) for setup, share in zip(chosen, shares, strict=True)]

    def _pipelines(self, *, several: bool) -> Iterator[_Grown]:
        """Whole pipelines that do not reach the limit by what they take at least; with all micro-batches, or with as
        many as several replicas leave to one."""
        yield from self._extended(_Grown((), (), 0, 0.0, 0.0), several)

    def _extended(self, before: _Grown, several: bool) -> Iterator[_Grown]:
        unused = [name for name in self._fleet.names if name not in before.devices]
        again = before.devices[:1] if self._returns_home and len(before.devices) > 1 else ()
        for name in (*unused, *again):
            home = name in before.devices
            left = [other for other in unused if other != name] if not home else []
            if self._returns_home and not home:
                left += [*before.devices[:1], *([] if before.devices else [name])]
            least = self._needed(left) if several else self._micro_batches
            for end in range(before.end + 1, len(self._edges)):
                self._grown += 1
                if self._grown > MOST_GROWN:
                    raise OutOfWork
                grown = self._with(before, name, end)
                if self._at_least(grown, before.end, (name, *left), least) >= self._below:
                    break  # a longer stage takes no less: what is left for others is no slower on this device
                if end == len(self._edges) - 1:
                    yield grown
                elif left and self._at_least(grown, end, left, least) < self._below:
                    yield from self._extended(grown, several)

    def _with(self, before: _Grown, name: str, end: int) -> _Grown:
        start = before.end
        compute_s = (self._work[end] - self._work[start]) / self._speed[name]
        spent_s, slowest_s = before.spent_s + compute_s, max(before.slowest_s, compute_s)
        if before.devices:
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
        """Seconds of so many micro-batches, where `left` run the blocks from `since` on; of prices, for the devices so
        far."""
        speeds = [self._speed[name] for name in left]
        spent_s = grown.spent_s + (self._work[-1] - self._work[grown.end]) / max(speeds)
        slowest_s = max(grown.slowest_s, (self._work[-1] - self._work[since]) / sum(speeds))
        found_s = spent_s + (micro_batches - 1) * slowest_s
        if not self._form.priced:
            return found_s
        hourly = sum(self._fleet.device(name).price_per_hour for name in set(grown.devices))
        return found_s * hourly / SECONDS_PER_HOUR

    def _needed(self, left: Sequence[str]) -> int:
        """Micro-batches that are left to a replica however well the devices beside it do."""
        if not self._bounds.work:
            return 1
        others = len(left) // self._bounds.fewest
        others += self._below * sum(self._speed[n] for n in left) / self._bounds.work
        return max(1, self._micro_batches - math.floor(others + 1e-9))
