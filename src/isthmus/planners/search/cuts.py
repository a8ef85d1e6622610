"""Where to cut a model for given orders of devices: many orders, and limits on the period of each, at a time.

Under a limit T on what stages and links take per micro-batch, one dynamic programme finds the least time of one
micro-batch, there and back, from stage s on, which begins at block a:

    rest[s, a] = min over b of compute(a, b) / v[s] + messages to [a, b) + rest[s + 1, b]

A stage has memory for as many micro-batches as hide its round trip behind the period: ceil((compute + rest) / T), or
all under gpipe. What a stage receives comes from the first stage if the first block made it, and else as if from the
stage before: exact where nothing else skips a stage. What is found has its true price then, and moves (`descent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost import Problem
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import RunTable, cut_table, run_table
from isthmus.cost.kernel import Bools, Floats, Ints
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Trials, most_in_flight
from isthmus.planners.observer import looked_at
from isthmus.planners.search.descent import Stages, likely_choice
from isthmus.planners.search.fixed_placement import Order

LIMITS, ROUNDS = 8, 2  # limits on the period of each order, spread over a range, and again around the best
MOST_CELLS = 1 << 21  # that are looked at together


class CutOrder(NamedTuple):
    """A pipeline and its step in seconds."""

    stages: Stages
    step_s: float


def cut_orders(problem: Problem, network: FleetNetwork, blocks: Blocks, orders: Sequence[Order]) -> list[CutOrder]:
    """The best cut that was found of each order, the best order first; of one that fits no way there is none."""
    found: dict[Order, CutOrder] = {}
    plain = run_table(blocks)
    for table in (plain, *([run_table(blocks.recomputing())] if _gains(problem, network, plain) else [])):
        for size in sorted({len(order) for order in orders if len(order) <= blocks.count}):
            alike = np.array([order for order in orders if len(order) == size])
            rows = max(1, MOST_CELLS // (LIMITS * blocks.count**2))
            for k in range(0, len(alike), rows):
                looked_at(len(alike[k : k + rows]))
                for made in _Orders(problem, network, blocks, table, alike[k : k + rows]).run():
                    known = found.get(made.stages.order, made)
                    found[made.stages.order] = min(known, made, key=lambda cut: cut.step_s)
    return sorted(found.values(), key=lambda made: made.step_s)


def _gains(problem: Problem, network: FleetNetwork, table: RunTable) -> bool:
    """Return whether stages that recompute may gain: some device does not hold the model and all micro-batches."""
    most = table.fixed_bytes[0, -1] + most_in_flight(problem) * table.each_bytes[0, -1]
    return problem.recompute and bool(most > network.memory.min())


class _Orders:
    """Orders of equally many devices."""

    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, table: RunTable, orders: Ints) -> None:
        """The table may be of stages that recompute; true prices choose which do."""
        self.problem, self.network, self.blocks, self.table, self.orders = problem, network, blocks, table, orders

    def run(self) -> list[CutOrder]:
        """The best cut of each order that fits."""
        ends, fill_s = self._cut(np.full((len(self.orders), 1), np.inf))
        fits = np.isfinite(fill_s[:, 0])
        self.orders, ends, fill_s = self.orders[fits], ends[fits], fill_s[fits]
        if not len(self.orders):
            return []
        best, best_s = ends[:, 0], self._steps_s(ends, fill_s)[:, 0]
        # A period is no shorter than of perfectly balanced work, and no longer than a micro-batch alone.
        low = self.table.work[0, -1] / self.network.speed[self.orders].sum(axis=1)
        high = np.maximum(fill_s[:, 0], low)
        rows = np.arange(len(self.orders))
        for _ in range(ROUNDS if self.problem.micro_batches > 1 else 0):
            limits_s = np.geomspace(low, high, LIMITS, axis=1)
            ends, fill_s = self._cut(limits_s)
            steps_s = self._steps_s(ends, fill_s)
            k = steps_s.argmin(axis=1)
            better = steps_s[rows, k] < best_s
            best = np.where(better[:, None], ends[rows, k], best)
            best_s = np.where(better, steps_s[rows, k], best_s)
            low, high = limits_s[rows, np.maximum(k - 1, 0)], limits_s[rows, np.minimum(k + 1, LIMITS - 1)]
        several = zip(map(tuple, self.orders.tolist()), map(tuple, best.tolist()), best_s.tolist(), strict=True)
        return [CutOrder(Stages(order, cut), step_s) for order, cut, step_s in several if np.isfinite(step_s)]

    def _steps_s(self, ends: Ints, fill_s: Floats) -> Floats:
        """[orders, limits] seconds of a step, by true prices; infinite where it does not fit."""
        count = ends.shape[1]
        trials = Trials(
            cut_table(self.blocks, ends.reshape(-1, ends.shape[2])),
            np.arange(len(self.orders) * count),
            np.repeat(self.orders, count, axis=0),
        )
        made = likely_choice(self.problem, self.network, trials, self.problem.micro_batches)
        steps_s = made.step_s(self.problem.micro_batches).reshape(-1, count)
        return np.where(np.isfinite(fill_s), steps_s, np.inf)

    def _cut(self, limits_s: Floats) -> tuple[Ints, Floats]:
        """[orders, limits, stages + 1] block boundaries, [orders, limits] seconds of one micro-batch; infinite where no
        cut keeps to the limit."""
        count, stages = self.blocks.count, self.orders.shape[1]
        rest = np.full((*limits_s.shape, count + 1), np.inf)
        rest[..., count] = 0.0
        chosen: list[Ints] = []
        for s in reversed(range(stages)):
            rows = slice(0, 1) if s == 0 else slice(1, count)
            cost, compute, busy = self._costs(s, rows)
            total = cost[:, None] + rest[:, :, None, :]
            allowed = busy[:, None] <= limits_s[..., None, None]
            allowed &= self._fits(s, rows, compute[:, None] + rest[:, :, None, :], limits_s)
            if s == stages - 1 and s:
                allowed[:, :, self.blocks.last_start :] = False  # rows begin at block 1
            total[~allowed] = np.inf
            ends = total.argmin(axis=3)
            rest = np.full((*limits_s.shape, count + 1), np.inf)
            rest[..., rows] = np.take_along_axis(total, ends[..., None], axis=3)[..., 0]
            chosen.append(np.pad(ends, ((0, 0), (0, 0), (rows.start, count + 1 - rows.stop))))
        found = [np.zeros(limits_s.shape, dtype=np.int64)]
        for ends in reversed(chosen):
            found.append(np.take_along_axis(ends, found[-1][..., None], axis=2)[..., 0])
        return np.stack(found, axis=2), rest[..., 0]

    def _costs(self, s: int, rows: slice) -> tuple[Floats, Floats, Floats]:
        """[orders, starts, ends]: compute and messages of stage s, compute alone, and the longest that anything is
        busy."""
        table, net, device = self.table, self.network, self.orders[:, s]
        compute = table.work[rows] / net.speed[device][:, None, None]
        cost = busy = compute
        for received, source in ((table.early, self.orders[:, 0]), (table.later, self.orders[:, s - 1])) if s else ():

            def link(values: Floats, a: Ints, b: Ints) -> Floats:
                return values[a, b][:, None, None]

            forward, backward, shared, gradient, count = (amount[rows] for amount in received)
            there_s, back_s = link(net.byte_s, source, device), link(net.byte_s, device, source)
            latency = link(net.latency, source, device) + link(net.latency, device, source)
            there, back = forward * there_s, backward * back_s
            cost = cost + there + back + shared * there_s + gradient * back_s + (count + (forward > 0)) * latency
            busy = np.maximum(busy, np.maximum(there, back))
        return cost, compute, busy

    def _fits(self, s: int, rows: slice, trip_s: Floats, limits_s: Floats) -> Bools:
        """[orders, limits, starts, ends]: whether memory holds the micro-batches that hide the round trip."""
        count, table = most_in_flight(self.problem), self.table
        room = self.network.memory[self.orders[:, s]][:, None, None, None]
        fixed, each = table.fixed_bytes[rows], table.each_bytes[rows]
        if (fixed + count * each).max() <= room.min():
            return np.ones(1, dtype=bool)
        if self.problem.schedule == "gpipe":
            return np.asarray(fixed + count * each <= room)
        with np.errstate(invalid="ignore"):
            held = np.clip(np.ceil(trip_s / limits_s[..., None, None]), 1, count)
        return np.asarray(fixed + held * each <= room)
