"""Bounds of any pipeline of a problem: the devices of its first stage, the bytes between its stages, and its time."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.verification.closed_form import ClosedForm, Setup
from isthmus.verification.device_sets import INFINITE
from isthmus.verification.reading import GraphReading
from isthmus.verification.sent import Floats, Ints, SentBytes
from isthmus.verification.timing import PipelineCheck
from isthmus.verification.walks import EACH, Walks

MOST_MESSAGES = 8_000_000
"""Seconds of messages, by source and stage, up to which what comes before a stage is looked at for each."""
MOST_KEPT = 20_000  # pairs of a stage and a boundary before it of which arrays are kept
MOST_TIMED, MOST_SHARDED = 5, 6
"""Replicas, of which it is known which ring planners choose; and those whose collectives are all looked at."""
MOST_ORDERS = 24  # orders of replicas that are timed each: those of four


class PipelineStage(NamedTuple):
    """Blocks on a device of a kind."""

    kind: int
    start: int
    end: int
    again: bool  # it computes its forward twice
    trip_s: float  # from the start of a micro-batch's forward to the end of its backward, at least


class SentInto(NamedTuple):
    """[kind, start]: what a stage of that kind and start, that ends at a boundary, sends one stage behind it."""

    sent_s: Floats  # both ways, shared parameters too
    busy_s: Floats
    through_s: Floats  # there and back for a micro-batch; minus infinite where nothing returns
    far_s: Floats  # [start]: what comes from before, at least


Among = tuple[slice | Ints, slice]  # kinds and starts that are looked at


class Joined(NamedTuple):
    """Stages with one before them, of each kind and start: [..., kind, start]."""

    spent_s: Floats  # seconds of one micro-batch, and of parameters that the stages share
    busy_s: Floats
    far_s: Floats  # [start]: what comes from before, at least
    home_s: Floats
    """From the end of the first one's forward to the return of its gradient; 0 where round trips are not asked for."""


class Goal:
    """The time to be proven: a known plan's, or a bound. A faster plan that is found becomes the goal."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.found: tuple[Setup, ...] = ()  # the plan's replicas, where it was come upon


class SearchedPipelines:
    """The messages of stages and the times of whole pipelines, of one problem."""

    def __init__(self, reading: GraphReading, walks: Walks, goal: Goal) -> None:
        self.walks, self.goal, self.sent = walks, goal, SentBytes(reading)
        self._form = ClosedForm(reading, priced=False, least=True)
        self._edges = (0, *reading.places, len(reading.operators))
        self.question = question = reading.question
        self._holders = set(question.constraints.data_holders)
        self.known = question.constraints.compression is None and not question.shares_uplinks
        """Whether what a suffix takes is known to the last byte."""
        kinds = walks.kinds
        self._far_rates = [
            x.min(axis=axis)
            for x, axis in (
                (kinds.byte_s, 0),
                (kinds.byte_s, 1),
                (kinds.byte_s + kinds.byte_s.T, 0),
                (kinds.latency + kinds.latency.T, 0),
                (kinds.latency, 0),
                (kinds.latency, 1),
            )
        ]
        self.parameters = len(reading.variables)
        self._into: dict[tuple[int, int, int, int], SentInto] = {}

    @cached_property
    def may_begin(self) -> NDArray[np.bool_]:
        """[kind]: whether a device of it may have the first stage."""
        kinds = self.walks.kinds.all
        return np.array([not self._holders or not self._holders.isdisjoint(kind.names) for kind in kinds])

    @cached_property
    def messages(self) -> tuple[Floats, Floats] | None:
        """[start, length - 1, kind, class, kind before]: seconds of what a stage receives and returns, and how long
        that keeps a link busy. None where there are too many."""
        walks = self.walks
        blocks, count, classes = walks.arrays.blocks, len(walks.kinds.all), len(walks.arrays.near_there)
        if blocks**2 * count**2 * classes > MOST_MESSAGES:
            return None
        found = np.full((2, blocks, blocks, count, classes, count), INFINITE)
        for start in range(1, blocks):
            for table, each in zip(found, walks.messages(start, blocks - start), strict=False):
                table[start, : blocks - start] = each.transpose(3, 2, 0, 1)
        return found[0], found[1]

    @property
    def searchable(self) -> bool:
        """Return whether several can be searched at once: without a limit of the price, which other shares may keep to,
        and where messages are known."""
        return self.question.constraints.max_price is None and self.messages is not None

    def into(self, stage: PipelineStage, end: int) -> SentInto:
        """Return the messages to this stage from stages that end there, for every start below the end."""
        key = stage.kind, stage.start, stage.end, end
        if key not in self._into:
            if len(self._into) > MOST_KEPT:
                self._into.clear()
            self._into[key] = self._sent_into(stage, end)
        return self._into[key]

    def joined(self, stages: Sequence[PipelineStage], end: int, begun: Joined, among: Among, *, trips: bool) -> Joined:
        """`begun` and what the stages receive from one that ends there. `trips`: whether round trips are asked for."""
        spent_s, busy_s, far_s, home_s = begun
        for number, stage in enumerate(stages):
            if number and self.sent.received(stage.start, stage.end).first >= end:
                continue
            into = self.into(stage, end)
            spent_s, far_s = spent_s + into.sent_s[among], far_s + into.far_s[among[1]]
            busy_s = np.maximum(busy_s, into.busy_s[among])
            if trips:
                home_s = np.maximum(home_s, into.through_s[among] + stage.trip_s)
        return Joined(spent_s, busy_s, far_s, home_s)

    def _sent_into(self, stage: PipelineStage, end: int) -> SentInto:
        walks, kind = self.walks, stage.kind
        received = self.sent.received(stage.start, stage.end)
        there, back, shared, count = (row[:end] - row[end] for row in received[:4])
        byte_s, back_byte_s = walks.byte_s[:, kind, None], walks.byte_s[kind, :, None]
        latency, back_latency = walks.latency[:, kind, None], walks.latency[kind, :, None]
        there_s, back_s = byte_s * there, back_byte_s * back
        message_s = there_s + back_s + latency * (there > 0) + back_latency * (back > 0)
        sent_s = message_s + (byte_s + back_byte_s) * shared + (latency + back_latency) * count
        busy_s = np.maximum(there_s, back_s)
        up = walks.kinds.uplink_s
        if up.any():
            busy_s = np.maximum(busy_s, np.maximum(up[:, kind, None] * there, up[kind, :, None] * back))
        through_s = np.where((there > 0) & (back > 0), message_s, -INFINITE)
        before = [row[0] - row[:end] for row in received[:4]]
        before += [(before[0] > 0).astype(np.float64), (before[1] > 0).astype(np.float64)]
        far_s = np.zeros(end)
        for rate, amount in zip(self._far_rates, before, strict=True):
            if amount.any():
                far_s += np.where(amount > 0, rate[kind] * amount, 0.0)
        walks.work += EACH
        return SentInto(sent_s, busy_s, through_s, far_s)

    def step_s(
        self, replicas: Sequence[tuple[PipelineStage, ...]], sums_s: float = 0.0, *, sharded: bool = True
    ) -> float:
        """Return the time of pipelines that share a batch as it ends soonest, before limits of the terms; infinite
        where they are no plan. With sums that take `sums_s`, which is the least, where that is at or above the goal or
        there are too many replicas. `sharded`: no sum may end sooner otherwise."""
        unused = [sorted(kind.names, key=lambda name: name in self._holders) for kind in self.walks.kinds.all]
        # Holders of data last: one of them has each first stage.
        first = [unused[stages[0].kind].pop() for stages in replicas]
        setups = list[Setup]()
        for device, stages in zip(first, replicas, strict=True):
            devices = (device, *(unused[stage.kind].pop(0) for stage in stages[1:]))
            starts = tuple(self._edges[stage.start] for stage in stages)
            setups.append(Setup(devices, starts, 1, tuple(stage.again for stage in stages)))
        self.walks.work += EACH * (8 * len(setups) + self.question.micro_batches)
        timed = [pipeline for setup in setups if (pipeline := self._form.pipeline(setup)) is not None]
        if len(timed) < len(setups):
            return INFINITE
        shares, best_s = _shares(timed, self.question.micro_batches), INFINITE
        least_s = sums_s + max(pipeline.step_s(share) for pipeline, share in zip(timed, shares, strict=True))
        if least_s >= self.goal.step_s or len(replicas) > (MOST_SHARDED if sharded else MOST_TIMED):
            return least_s
        orders = _orders(replicas)
        for order in orders[:MOST_ORDERS]:
            self.walks.work += EACH * len(order) ** 2
            step_s = max(least_s, self._form.of([timed[k] for k in order], [shares[k] for k in order]))
            best_s = min(best_s, step_s)
            if step_s < self.goal.step_s:
                self.goal.step_s = step_s
                self.goal.found = tuple(setups[k]._replace(micro_batches=shares[k]) for k in order)
        # Another device of the same kind may cost less than the limit of the price.
        priced = self.question.constraints.max_price is not None
        return least_s if priced or len(orders) > MOST_ORDERS else best_s


def _shares(pipelines: Sequence[PipelineCheck], micro_batches: int) -> list[int]:
    """Divide the batch so that the last pipeline ends soonest: each micro-batch goes where it ends first."""
    shares = [1] * len(pipelines)
    if len(shares) == 1:
        return [micro_batches]
    for _ in range(micro_batches - len(shares)):
        ends = [pipeline.step_s(share + 1) for pipeline, share in zip(pipelines, shares, strict=True)]
        shares[ends.index(min(ends))] += 1
    return shares


def _orders(replicas: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """Return orders of different replicas: sums of more than two devices depend on the first one."""
    orders = itertools.permutations(range(len(replicas))) if len(replicas) > 2 else [tuple(range(len(replicas)))]
    return list({tuple(replicas[k] for k in order): order for order in orders}.values())
