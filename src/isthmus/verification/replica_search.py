"""Replicas of given devices, by branch and bound: all of them stage by stage, from the last block to the first.

The replica that has come least far is continued. Once all have passed a block, it is known which devices sum its
gradients. A group of devices ends where one of its stages begins, so what a known group sums is known to the last byte:

    averaging >= max over known groups of time(group), and over links of what known groups send over them

A replica whose stages so far take C seconds per micro-batch and have the period P ends at most

    1 + (T - averaging - C - F[left, c, s] - message(c, d, s)) / max(A, P)

micro-batches by T, for the interval A..B of periods in which these are most; `left` are its other devices, all of which
it has, and F(B) is the least fill of the blocks before (`walks`). If all replicas together end fewer micro-batches than
there are, they are not continued.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.verification.device_sets import INFINITE, Tracked
from isthmus.verification.group_times import GroupTimes
from isthmus.verification.pipelines import Joined, PipelineStage, SearchedPipelines
from isthmus.verification.sent import Floats, Ints
from isthmus.verification.walks import EACH, SLACK, Terms

WHOLE = 1e-9  # micro-batches: so close below a whole number is one
STEPS = 4  # arrays of a continued replica, about, that count as work


class PeriodTerms(NamedTuple):
    """A replica with a period from `low_s` to the terms' threshold has no more than `most` micro-batches."""

    low_s: float
    terms: Terms
    most: int
    key: Hashable  # the same where all of this is


class PeriodWalks(NamedTuple):
    periods: PeriodTerms
    stages: Floats  # [kind, start, length - 1]: infinite where none may be (`Walks.stages`)
    found: Floats  # [class, state, kind, end]: the least fill (`Walks.solve`)


class ReplicaSuffix(NamedTuple):
    """The last stages of a replica."""

    start: int
    stages: tuple[PipelineStage, ...]
    spent_s: float
    left: int  # state of the devices that have no stage
    open: Ints  # intervals of periods that it may have
    period_s: Floats  # [open interval]: of these stages, and no less than the interval's shortest
    fill_s: Floats  # [open interval]: of the whole replica, at least


class _Longer(NamedTuple):
    """Suffixes with one stage more, from `lowest` on: [open interval, recomputed, kind, start]."""

    lowest: int
    fill_s: Floats
    period_s: Floats
    spent_s: Floats  # [recomputed, kind, start]; so is the next
    trip_s: Floats
    left: Ints  # [kind]


class _StagesTo(NamedTuple):
    """Stages that end at a boundary, from the first start that any has: [interval, recomputed, kind, start]."""

    lowest: int
    compute_s: Floats  # [recomputed, kind, start]
    period_s: Floats  # infinite where none may be
    over_held: Floats  # one divided by the micro-batches that a stage holds, where these are not all
    before_s: Floats  # [interval, state, kind, start]: what the blocks before take at least, with the messages to it


class ReplicaTables:
    """One replica of these devices. `devices`: [kind], how many; `tracked`: all kinds, whose states the walks have."""

    def __init__(
        self, pipelines: SearchedPipelines, devices: Ints, tracked: Tracked, intervals: Sequence[PeriodWalks]
    ) -> None:
        self._pipelines, walks = pipelines, pipelines.walks
        self.own = np.flatnonzero(devices)
        self._states = Tracked(walks.kinds, self.own.tolist(), devices.tolist())
        states = self._states.used @ tracked.strides[self.own]
        self._low_s = np.array([each.periods.low_s for each in intervals])
        self._limit_s = np.array([each.periods.terms.threshold_s * SLACK for each in intervals])
        self._most = np.array([each.periods.most for each in intervals], dtype=np.float64)
        self._more_than = np.array([each.periods.terms.more_than for each in intervals])
        self._before_s = np.stack(
            [each.found[:, states][:, :, self.own].transpose(3, 1, 0, 2) for each in intervals], axis=1
        )
        """[boundary, interval, state, class, kind]"""
        options = [walks.options(each.periods.terms, each.stages, each.periods.most) for each in intervals]
        self._period_s, self._over_held = (np.stack(each)[:, :, self.own] for each in zip(*options, strict=True))
        self._compute_s = np.stack([compute_s[self.own] for compute_s in walks.compute_s])
        self._held_up = bool(self._over_held.any())
        self._to: dict[int, _StagesTo] = {}
        self.bytes = 8 * self._period_s.size * (2 + self._states.size)
        """About the bytes of all arrays, once they are needed."""
        walks.work += len(intervals) * EACH + 4 * self._period_s.size

    @property
    def begun(self) -> ReplicaSuffix:
        """Without a stage."""
        blocks, state = self._pipelines.walks.arrays.blocks, self._states.size - 1
        every = np.arange(len(self._low_s))
        return ReplicaSuffix(
            blocks, (), 0.0, state, every, self._low_s, self._before_s[blocks, :, state].min(axis=(1, 2))
        )

    def ended(self, open_: Ints, fill_s: Floats, period_s: Floats, time_s: Floats) -> Floats:
        """The most micro-batches in this time. But for the last, arrays begin with open intervals."""
        with np.errstate(invalid="ignore"):
            ended = np.minimum(np.floor(1 + (time_s - fill_s) / period_s + WHOLE), _along(self._most[open_], fill_s))
        possible = (fill_s <= time_s) & (ended > _along(self._more_than[open_], fill_s))
        return np.where(possible, ended, -INFINITE)

    def longer(self, suffix: ReplicaSuffix) -> _Longer:
        """Put every stage that ends where the suffix starts before it."""
        end, open_, (lowest, compute_s, *to) = suffix.start, suffix.open, self._stages_to(suffix.start)
        period_s, over_held, before_s = to if len(open_) == len(self._low_s) else (each[open_] for each in to)
        idle_s = np.zeros(compute_s.shape[1:])
        begun = Joined(compute_s + suffix.spent_s, idle_s, np.zeros(end - lowest), idle_s)
        among = self.own, slice(lowest, None)
        spent_s, busy_s, far_s, home_s = self._pipelines.joined(suffix.stages, end, begun, among, trips=self._held_up)
        period_s = np.maximum(np.maximum(period_s, busy_s), _along(suffix.period_s, period_s))
        trip_s = compute_s + home_s
        if self._held_up:
            period_s = np.maximum(period_s, np.where(over_held > 0, trip_s * over_held, 0.0))
        used_up = self._states.used[suffix.left] == 0
        left = np.where(used_up, 0, suffix.left - self._states.strides)
        fill_s = spent_s + far_s + before_s[:, left, np.arange(len(self.own))][:, None]
        fill_s[np.isinf(period_s) | (period_s > _along(self._limit_s[open_], period_s))] = INFINITE
        fill_s[:, :, used_up] = INFINITE
        return _Longer(lowest, fill_s, period_s, spent_s, trip_s, left)

    def _stages_to(self, end: int) -> _StagesTo:
        if end not in self._to:
            starts = np.arange(end)
            compute_s, period_s, over_held = (
                each[..., starts, end - 1 - starts] for each in (self._compute_s, self._period_s, self._over_held)
            )
            some = np.flatnonzero(np.isfinite(period_s).any(axis=(0, 1, 2)))
            lowest = int(some[0]) if len(some) else end
            self._to[end] = _StagesTo(
                lowest,
                compute_s[..., lowest:],
                period_s[..., lowest:],
                over_held[..., lowest:] * (end < self._pipelines.walks.arrays.blocks),
                self._before(lowest, end),
            )
        return self._to[end]

    def _before(self, lowest: int, end: int) -> Floats:
        """[interval, state, kind, start]: what the blocks before a stage up to `end` take, with the messages to it."""
        pipelines, states = self._pipelines, self._states.size
        assert pipelines.messages is not None, "replicas are searched where messages are known"
        found = np.full((len(self._low_s), states, len(self.own), end - lowest), INFINITE)
        for start in range(max(lowest, 1), end):
            sent_s, busy_s = (x[start, end - start - 1][self.own][:, :, self.own] for x in pipelines.messages)
            sent_s = np.where(busy_s <= _along(self._limit_s, busy_s[None]), sent_s, INFINITE)
            found[..., start - lowest] = (self._before_s[start][:, :, None] + sent_s[:, None]).min(axis=(3, 4))
        if not lowest and end:
            found[:, :1, pipelines.may_begin[self.own], 0] = 0.0  # all devices have stages
        pipelines.walks.work += (end - lowest) * EACH + found.size * len(self.own)
        return found


def _along(each: Floats, other: Floats) -> Floats:
    """[interval], shaped so that it goes with an array that begins with intervals."""
    return each.reshape(-1, *[1] * (other.ndim - 1))


class _Open(NamedTuple):
    """Replicas that are continued."""

    replicas: tuple[ReplicaSuffix, ...]
    sums_s: float  # the least time of the sums of known groups
    carried: Floats  # [replica, replica]: bytes of known groups between the devices of their first stages, each way
    sharded: bool = True  # no known group may sum sooner otherwise


class JointSearch:
    """Plans of these replicas, whose sums take `low_s` to `high_s`."""

    def __init__(
        self, pipelines: SearchedPipelines, groups: GroupTimes, replicas: Sequence[ReplicaTables], most: int
    ) -> None:
        """`most`: replicas that are continued."""
        self._pipelines, self._groups, self._replicas, self._left = pipelines, groups, replicas, most
        self._micro_batches = pipelines.question.micro_batches

    def none_below(self, limit_s: float, low_s: float, high_s: float, ended: Callable[[], bool]) -> bool:
        """Return whether no such plan takes less; False where that was not settled. Plans that are come upon are
        timed."""
        count, below = len(self._replicas), False
        open_ = [_Open(tuple(each.begun for each in self._replicas), low_s, np.zeros((count, count)))]
        while open_:
            if not self._left or ended():
                return False
            self._left -= 1
            one = open_.pop()
            number = max(range(count), key=lambda r: one.replicas[r].start)
            if one.replicas[number].start:
                open_ += self._continued(one, number, limit_s, high_s)
                continue
            step_s = self._pipelines.step_s([each.stages for each in one.replicas], one.sums_s, sharded=one.sharded)
            limit_s, below = min(limit_s, step_s), below or step_s < limit_s
        return not below

    def _continued(self, one: _Open, number: int, limit_s: float, high_s: float) -> list[_Open]:
        """With a stage more of this replica, in every way; the best last."""
        suffix, tables = one.replicas[number], self._replicas[number]
        longer = tables.longer(suffix)
        sums_s, carried, sharded = self._known_sums(one, number, longer.lowest)
        time_s = np.where(sums_s <= high_s * SLACK, limit_s - sums_s, -INFINITE)
        each = tables.ended(suffix.open, longer.fill_s, longer.period_s, time_s)
        others = np.zeros(time_s.shape)
        for r, (other, its) in enumerate(zip(one.replicas, self._replicas, strict=True)):
            if r != number:
                fill_s, period_s = (_along(x, time_s[None]) for x in (other.fill_s, other.period_s))
                others = others + its.ended(other.open, fill_s, period_s, time_s).max(axis=0)
        each = each + others
        ended = each.max(axis=0)
        self._pipelines.walks.work += STEPS * (EACH + longer.fill_s.size)
        chosen = np.argwhere((ended >= self._micro_batches) & self._in_order(one, number, longer, ended.shape))
        found, between = list[_Open](), np.arange(len(one.replicas)) != number
        for again, row, column in chosen[np.argsort(ended[tuple(chosen.T)], kind="stable")].tolist():
            at = again, row, column
            start, kind = longer.lowest + column, int(tables.own[row])
            stage = PipelineStage(kind, start, suffix.start, bool(again), float(longer.trip_s[at]))
            may = each[:, again, row, column] >= self._micro_batches
            more = ReplicaSuffix(
                start,
                (stage, *suffix.stages),
                float(longer.spent_s[at]),
                int(longer.left[row]),
                suffix.open[may],
                longer.period_s[may, again, row, column],
                longer.fill_s[may, again, row, column],
            )
            replicas = (*one.replicas[:number], more, *one.replicas[number + 1 :])
            # The new stage's device is in no group but the last.
            kept = np.where(between[:, None] & between, one.carried, 0.0) + carried[row, column]
            found.append(_Open(replicas, float(sums_s[row, column]), kept, one.sharded and bool(sharded[row, column])))
        return found

    def _known_sums(self, one: _Open, number: int, lowest: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """[kind, start]: what known groups take with a stage more, what each link of the last group carries, and
        whether that sums no sooner otherwise."""
        suffix, own, kinds = one.replicas[number], self._replicas[number].own, self._pipelines.walks.kinds
        others = [(r, other) for r, other in enumerate(one.replicas) if r != number]
        shape = len(own), suffix.start - lowest
        found, carried, sharded = np.full(shape, one.sums_s), np.zeros(shape), np.ones(shape, dtype=np.bool_)
        passed = max(other.start for _, other in others)
        if passed == suffix.start:  # a replica has not passed its last block
            return found, carried, sharded
        starts = np.maximum(np.arange(lowest, suffix.start), passed)
        first = {r: other.stages[0].kind for r, other in others}
        for row, kind in enumerate(own.tolist()):
            members = tuple(first.get(r, kind) for r in range(len(one.replicas)))
            seconds, carried[row] = self._groups.sums(members, starts, suffix.start)
            found[row], sharded[row] = np.maximum(found[row], seconds), (carried[row] > 0) | (seconds == 0)
            for (a, source), (b, target) in itertools.permutations(first.items(), 2):
                byte_s = kinds.byte_s[source, target] / self._pipelines.question.period
                crossed_s = (one.carried[a, b] + carried[row]) * byte_s + kinds.latency[source, target]
                found[row] = np.maximum(found[row], np.where(carried[row] > 0, crossed_s, 0.0))
        return found, carried, sharded

    def _in_order(self, one: _Open, number: int, longer: _Longer, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """[recomputed, kind, start]: of replicas with the same devices, one of their orders: by their last stages."""
        allowed, tables = np.ones(shape, dtype=np.bool_), self._replicas[number]
        if number and not one.replicas[number].stages and tables is self._replicas[number - 1]:
            last = one.replicas[number - 1].stages[-1]
            row = int(np.flatnonzero(tables.own == last.kind)[0])
            first = np.ravel_multi_index((int(last.again), row, last.start - longer.lowest), shape)
            allowed.ravel()[:first] = False
        return allowed
