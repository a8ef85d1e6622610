"""Many pipelines timed at once: the closed form of `cost.steptime` over arrays.

    step(m) = fill + shared + (m - 1) * max(busy, round_trip[s] / held[s] of the stages that hold fewer than m)

so a step only gets longer with its share m of the micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.cost import Problem
from isthmus.cost.cut_table import CutTable, Ints
from isthmus.cost.network import FleetNetwork, Floats

Bools = NDArray[np.bool_]

ROUNDING = 1e-12
"""Relative: so much later is still in time."""


@dataclass(frozen=True)
class Pipelines:
    """Pipelines of equally many stages. First axis: the pipeline."""

    order: Ints
    """[pipelines, stages]: devices."""
    ends: Ints
    """[pipelines, stages + 1]: block boundaries."""
    stage_of: Ints
    """[pipelines, blocks]"""
    fill_s: Floats
    """Shared parameters included."""
    busy_s: Floats
    """Of the slowest stage, link or uplink per micro-batch."""
    round_trip_s: Floats
    """[pipelines, stages]"""
    held: Floats
    """[pipelines, stages]: micro-batches that memory allows in flight."""
    most: Floats
    """Largest share that fits: the least of `held` under gpipe."""

    def fitting(self) -> Ints:
        """Rows whose stages hold one micro-batch at least."""
        return np.flatnonzero(self.held.min(axis=1) >= 1)

    def __getitem__(self, rows: Ints) -> Pipelines:
        return Pipelines(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def step_s(self, micro_batches: int) -> Floats:
        """[pipelines]: seconds of a step with so many micro-batches; infinite where they do not fit."""
        late_s = np.where(self.held < micro_batches, self.round_trip_s / np.maximum(self.held, 1), 0.0).max(axis=1)
        step_s = self.fill_s + (micro_batches - 1) * np.maximum(self.busy_s, late_s)
        return np.where((self.held.min(axis=1) >= 1) & (self.most >= micro_batches), step_s, np.inf)

    def put(self, rows: Ints, other: Pipelines) -> Pipelines:
        """With these rows replaced."""
        made = {field.name: getattr(self, field.name).copy() for field in fields(self)}
        for name, values in made.items():
            values[rows] = getattr(other, name)
        return Pipelines(**made)

    def counts(self, rows: Ints, time_s: Floats, most: int) -> Ints:
        """Micro-batches up to `most` that each of these pipelines ends within its time."""
        spare_s = time_s * (1 + ROUNDING) - self.fill_s[rows]
        busy_s = np.maximum(self.busy_s[rows], 1e-300)
        allowed = np.minimum(self.most[rows], most)
        high = np.where(spare_s >= 0, 1 + np.floor(np.minimum(spare_s / busy_s, most)), 0.0)
        high = np.minimum(high, allowed)
        held, round_trip_s = self.held[rows], self.round_trip_s[rows]
        late = (held < high[:, None]).any(axis=1)
        if late.any():
            high[late] = self._throttled(spare_s[late], high[late], held[late], round_trip_s[late])
        return high.astype(np.int64)

    @staticmethod
    def _throttled(spare_s: Floats, high: Floats, held: Floats, round_trip_s: Floats) -> Floats:
        """The most m up to `high` with (m - 1) * round_trip / held in time wherever fewer than m are held."""
        in_time = 1 + np.floor(spare_s[:, None] * held / np.maximum(round_trip_s, 1e-300))
        # Up to `held` a stage throttles nothing; beyond, no more than are in time.
        return np.minimum(high, np.maximum(held, in_time).min(axis=1))


@dataclass(frozen=True)
class Trials:
    """Pipelines to be timed: cut `cuts[k]` of the table, with stage s on device `order[k, s]`."""

    table: CutTable
    cuts: Ints
    order: Ints

    def __getitem__(self, rows: Ints) -> Trials:
        return Trials(self.table, self.cuts[rows], self.order[rows])


def timed(problem: Problem, network: FleetNetwork, trials: Trials, recompute: Bools | None = None) -> Pipelines:
    """These pipelines; in pipeline k stage s recomputes where `recompute[k, s]`. Some may not fit: `fitting`."""
    table, cuts, order = trials.table, trials.cuts, trials.order
    placed = _Placed(problem, network, trials, np.zeros(order.shape, dtype=bool) if recompute is None else recompute)
    compute_s = placed.forward_s + placed.backward_s
    fill_s, busy_s = compute_s.sum(axis=1), compute_s.max(axis=1)
    for message in placed.messages:
        fill_s = fill_s + message.forward_s + message.backward_s + message.shared_s
        busy_s = np.maximum(busy_s, message.wire_s)
    for uplink_s in placed.uplinks_s():
        busy_s = np.maximum(busy_s, uplink_s)
    held = placed.held()
    throttled = problem.schedule != "gpipe" and bool((held < problem.micro_batches).any())
    return Pipelines(
        order=order,
        ends=table.ends[cuts],
        stage_of=table.stage_of[cuts],
        fill_s=fill_s,
        busy_s=busy_s,
        round_trip_s=placed.round_trips_s() if throttled else np.zeros(order.shape),
        held=held,
        most=held.min(axis=1) if problem.schedule == "gpipe" else np.full(len(order), np.inf),
    )


def joined(several: Sequence[Pipelines]) -> Pipelines:
    """All of them, of equally many stages."""
    return Pipelines(
        **{field.name: np.concatenate([getattr(p, field.name) for p in several]) for field in fields(Pipelines)}
    )


class _TimedMessage(NamedTuple):
    """What two stages exchange, in seconds per pipeline."""

    source: int
    target: int
    forward_s: Floats
    backward_s: Floats
    """Either is 0 where nothing is sent, and -inf in `round_trips_s`."""
    shared_s: Floats
    wire_s: Floats
    sent: Bools
    returned: Bools


class _Placed:
    """Cuts on devices, row by row."""

    def __init__(self, problem: Problem, network: FleetNetwork, trials: Trials, recompute: Bools) -> None:
        self._problem, self._network, self._recompute = problem, network, recompute
        self._table, self._cuts, self._order = table, cuts, order = trials.table, trials.cuts, trials.order
        speed = network.speed[order]
        self.forward_s = table.forward_work[cuts] / speed
        self.backward_s = table.backward_work[cuts] / speed + recompute * self.forward_s
        self.messages = [
            self._message(source, target)
            for source, target in itertools.combinations(range(table.stages), 2)
            if table.forward[:, source, target].any() or table.shared[:, source, target].any()
        ]

    def held(self) -> Floats:
        """[pipelines, stages]: micro-batches for which a stage has memory; below 0 where its state does not fit."""
        table, cuts, again = self._table, self._cuts, self._recompute
        free = self._network.memory[self._order] - table.fixed_bytes[cuts] - again * table.saved_bytes[cuts]
        each = np.where(again, table.column_bytes[cuts], table.saved_bytes[cuts]) + table.received_bytes[cuts]
        held = np.full(free.shape, float(self._problem.micro_batches))
        np.floor_divide(free, each, out=held, where=each > 0)
        return np.where(free < 0, -1.0, held)

    def _message(self, source: int, target: int) -> _TimedMessage:
        table, network, cuts = self._table, self._network, self._cuts
        there = self._order[:, source], self._order[:, target]
        back = there[1], there[0]
        forward, backward = table.forward[cuts, source, target], table.backward[cuts, source, target]
        wire = forward * network.byte_s[there], backward * network.byte_s[back]
        return _TimedMessage(
            source,
            target,
            forward_s=wire[0] + (forward > 0) * network.latency[there],
            backward_s=wire[1] + (backward > 0) * network.latency[back],
            shared_s=table.shared_count[cuts, source, target] * (network.latency[there] + network.latency[back])
            + table.shared[cuts, source, target] * (network.byte_s[there] + network.byte_s[back]),
            wire_s=np.maximum(*wire),
            sent=forward > 0,
            returned=backward > 0,
        )

    def uplinks_s(self) -> Iterator[Floats]:
        """Per site with a shared uplink: seconds that one micro-batch's bytes occupy it."""
        regions = np.array([device.region for device in self._problem.fleet.devices])
        for site in self._problem.fleet.region_info:
            if site.uplink_bytes_per_s is None:
                continue
            home = (regions == site.region)[self._order]
            size = np.zeros(len(self._cuts))
            for m in self.messages:
                forward = self._table.forward[self._cuts, m.source, m.target]
                backward = self._table.backward[self._cuts, m.source, m.target]
                size += forward * (home[:, m.source] & ~home[:, m.target])
                size += backward * (home[:, m.target] & ~home[:, m.source])
            yield size / site.uplink_bytes_per_s

    def round_trips_s(self) -> Floats:
        """[pipelines, stages]: from the start of a micro-batch's forward to the end of its backward, alone."""
        rows, stages = self._order.shape
        there = np.full((rows, stages, stages), -np.inf)
        back = there.copy()
        for m in self.messages:
            there[m.sent, m.source, m.target] = m.forward_s[m.sent]
            back[m.returned, m.source, m.target] = m.backward_s[m.returned]
        found = np.zeros((rows, stages))
        for start in range(stages):
            done = np.full((rows, stages), -np.inf)
            done[:, start] = self.forward_s[:, start]
            for stage in range(start + 1, stages):
                arrived = (done[:, start:stage] + there[:, start:stage, stage]).max(axis=1)
                done[:, stage] = arrived + self.forward_s[:, stage]
            ended = np.full((rows, stages), -np.inf)
            for stage in reversed(range(start, stages)):
                returned = (ended[:, stage + 1 :] + back[:, stage, stage + 1 :]).max(axis=1, initial=-np.inf)
                ended[:, stage] = np.maximum(done[:, stage], returned) + self.backward_s[:, stage]
            found[:, start] = ended[:, start]
        return found
