"""A label-free dynamic programme over cuts and orders: exact where values cross one boundary, a lower bound elsewhere.

For a threshold B it finds the least `fill + shared` of all pipelines whose stages and links take at most B per
micro-batch. A value that was not made in the stage just before, nor in the first block, is charged at the best
rate of any earlier device: the state does not say which one holds it. So the result bounds the true cost from
below, and `exact_cut` needs to look only where it is not tight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from isthmus.cost import Problem
from isthmus.planners.network import Floats, Network
from isthmus.planners.routes import ANY, Routes, State
from isthmus.planners.stage_tables import Received, StageTables

SMALL_TABLE = 60_000
"""Cells of a table up to which costs per pair of devices are kept between thresholds."""


class Path(NamedTuple):
    """Devices by number, and the block boundaries between them."""

    devices: tuple[int, ...]
    cut: tuple[int, ...]


class Relaxed(NamedTuple):
    sum_s: float
    bottleneck_s: float
    path: Path


class _Cells(NamedTuple):
    """Seconds of every stage [a, b) on one device after another: cost in the sum, and in the bottleneck."""

    cost: Floats
    bottleneck: Floats


class Relaxation:
    def __init__(self, problem: Problem, network: Network, tables: StageTables, routes: Routes) -> None:
        self.problem = problem
        self.network = network
        self.tables = tables
        self.routes = routes
        self._small = tables.count * tables.width <= SMALL_TABLE
        self._kept: dict[tuple[int, int, bool], _Cells] = {}
        self._early: dict[tuple[int, int], Floats] = {}
        self._fits: dict[tuple[int, int], NDArray[np.bool_]] = {}
        self._member_speed = float(sum(network.speed[d] for d in routes.members))
        self.threshold = 0.0
        self.values: list[Floats] = []
        """Per state: least cost from each boundary to the end under the last threshold solved."""
        self._allowed: dict[tuple[int, int, bool, int], Floats] = {}

    def in_flight(self, remaining: int) -> int:
        """Micro-batches that the next stage holds when `remaining` stages are to come, itself included."""
        if self.problem.schedule == "gpipe":
            return self.problem.micro_batches
        most = len(self.routes.members) if remaining == ANY else remaining
        return min(self.problem.micro_batches, most)

    def solve(self, threshold: float) -> Relaxed | None:
        """The least sum under `threshold`, and a pipeline that attains it; None where no pipeline keeps to it."""
        self.threshold = threshold
        self._allowed = {}
        count = self.tables.count
        self.values = [np.full(count + 1, np.inf) for _ in self.routes.states]
        for number in reversed(range(len(self.routes.states))):
            best = self.values[number]
            if self.routes.may_end(number):
                best[count] = 0.0
            low, high = self._rows(self.routes.states[number])
            if low < high:
                for device, after in self.routes.steps[number]:
                    total = self._totals(self.routes.states[number], device, after, low, high)
                    np.minimum(best[low:high], total.min(axis=1), out=best[low:high])
        root = min(self.routes.roots, key=lambda r: self.values[r][0])
        if not np.isfinite(self.values[root][0]):
            return None
        return self._follow(root)

    def row(self, number: int, device: int, after: int, start: int) -> Floats:
        """Lower bounds of the cost from boundary `start` on, by where the stage on `device` ends: start + 1, ..."""
        return self._totals(self.routes.states[number], device, after, start, start + 1)[0]

    def _follow(self, number: int) -> Relaxed:
        total = float(self.values[number][0])
        start, devices, cut, bottleneck = 0, list[int](), list[int](), 0.0
        while start < self.tables.count:
            rows = [self.row(number, device, after, start) for device, after in self.routes.steps[number]]
            choice = min(range(len(rows)), key=lambda i: float(rows[i].min()))
            device, after = self.routes.steps[number][choice]
            state, offset = self.routes.states[number], int(rows[choice].argmin())
            cells = self._cells(state.last, device, _only(state), start, start + 1)
            bottleneck = max(bottleneck, float(cells.bottleneck[0, offset]))
            start, number = start + offset + 1, after
            devices.append(device)
            cut.append(start)
        return Relaxed(total, bottleneck, Path(tuple(devices), tuple(cut[:-1])))

    def _rows(self, state: State) -> tuple[int, int]:
        """Boundaries that the devices used so far can have reached, and from which the others can finish."""
        if state.used == 0:
            return 0, 1
        count, work = self.tables.count, self.tables.blocks.work
        if not np.isfinite(self.threshold):
            return 1, count
        used = sum(float(self.network.speed[d]) for d in self.routes.members if state.used >> d & 1)
        slack = 1e-9 * work[-1]
        low = int(np.searchsorted(work, work[-1] - self.threshold * (self._member_speed - used) - slack, "left"))
        high = int(np.searchsorted(work, self.threshold * used + slack, "right"))
        return max(1, low), min(high, count)

    def _totals(self, state: State, device: int, after: int, low: int, high: int) -> Floats:
        width = self.tables.width
        padded = np.concatenate([self.values[after], np.full(width, np.inf)])
        total = sliding_window_view(padded, width)[low + 1 : high + 1] + self._base(state, device, low, high)
        if state.last < 0 or _only(state):
            return total
        if not self.tables.early.empty:
            total += self._early_cost(state.first, device)[low:high]
        if not self.tables.other.empty:
            total += self._other_cost(state.used, device, low, high)
        return total

    def _base(self, state: State, device: int, low: int, high: int) -> Floats:
        """Cost of the stage and of what the stage before sends it; infinite where threshold or memory forbid it."""
        held, only = self.in_flight(state.remaining), _only(state)
        if not self._small:
            cells = self._cells(state.last, device, only, low, high)
            return self._forbid(cells, device, held, low, high)
        key = (state.last, device, only, held)
        if key not in self._allowed:
            cells = self._cells(state.last, device, only, 0, self.tables.count)
            self._allowed[key] = self._forbid(cells, device, held, 0, self.tables.count)
        return self._allowed[key][low:high]

    def _forbid(self, cells: _Cells, device: int, held: int, low: int, high: int) -> Floats:
        allowed = (cells.bottleneck <= self.threshold) & self.fits(device, held, low, high)
        return np.where(allowed, cells.cost, np.inf)

    def fits(self, device: int, held: int, low: int, high: int) -> NDArray[np.bool_]:
        """Which stages that start in low..high-1 fit the device with `held` micro-batches in flight."""
        if self._small and (device, held) in self._fits:
            return self._fits[device, held][low:high]
        tables = self.tables
        rows = slice(None) if self._small else slice(low, high)
        need = tables.fixed_bytes[rows] + held * tables.micro_batch_bytes[rows]
        fit = need <= self.network.memory[device]
        if not self._small:
            return fit
        self._fits[device, held] = fit
        return fit[low:high]

    def _cells(self, last: int, device: int, only: bool, low: int, high: int) -> _Cells:
        if not self._small:
            return self._cost(last, device, only, slice(low, high))
        key = (last, device, only)
        if key not in self._kept:
            self._kept[key] = self._cost(last, device, only, slice(None))
        kept = self._kept[key]
        return _Cells(kept.cost[low:high], kept.bottleneck[low:high])

    def _cost(self, last: int, device: int, only: bool, rows: slice) -> _Cells:
        compute = self.tables.work[rows] / self.network.speed[device]
        if last < 0:
            return _Cells(compute, compute)
        received = self.tables.total if only else self.tables.near
        there = received.forward[rows] * self.network.byte_s[last, device]
        back = received.backward[rows] * self.network.byte_s[device, last]
        cost = compute + there + back
        cost += (there > 0) * self.network.latency[last, device] + (back > 0) * self.network.latency[device, last]
        if only:
            cost += self._shared_cost(received, last, device, rows)
        return _Cells(cost, np.maximum(compute, np.maximum(there, back)))

    def _shared_cost(self, received: Received, owner: int, device: int, rows: slice) -> Floats:
        net = self.network
        latency = net.latency[owner, device] + net.latency[device, owner]
        return received.shared_count[rows] * latency + received.shared[rows] * (
            net.byte_s[owner, device] + net.byte_s[device, owner]
        )

    def _early_cost(self, first: int, device: int) -> Floats:
        """What the first stage sends, at its true price."""
        if (first, device) not in self._early:
            net, early = self.network, self.tables.early
            there = early.forward * net.byte_s[first, device]
            back = early.backward * net.byte_s[device, first]
            cost = there + back + (there > 0) * net.latency[first, device] + (back > 0) * net.latency[device, first]
            self._early[first, device] = cost + self._shared_cost(early, first, device, slice(None))
        return self._early[first, device]

    def _other_cost(self, used: int, device: int, low: int, high: int) -> Floats:
        """Everything else, from whichever earlier device is cheapest; latency may already have been paid."""
        net, rows = self.network, slice(low, high)
        before = [d for d in self.routes.members if used >> d & 1]
        there, back = net.byte_s[before, device], net.byte_s[device, before]
        latency = float((net.latency[before, device] + net.latency[device, before]).min())
        other = self.tables.other
        return (
            other.forward[rows] * float(there.min()) + other.backward[rows] * float(back.min())
            + other.shared[rows] * float((there + back).min()) + other.shared_count[rows] * latency
        )  # fmt: skip


def _only(state: State) -> bool:
    """Whether one stage is all there is before: then every value comes from it, and nothing is relaxed."""
    return state.used != 0 and state.first == state.last
