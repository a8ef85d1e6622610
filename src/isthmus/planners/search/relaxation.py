"""A label-free dynamic programme over cuts and orders: exact where values cross one boundary, a lower bound elsewhere.

For a threshold B it finds the least `fill + shared` of all pipelines whose stages and links take at most B per
micro-batch. A value that was not made in the stage just before, nor in the first block, is charged at the best
rate of any earlier device: the state does not say which one holds it. So the result bounds the true cost from
below, and `search.cuts` needs to look only where it is not tight.

What a stage [a, b) receives is tabled for all stages at once, by who must have sent it:

    near    made in block a - 1, so certainly in the stage before (values only)
    early   made in block 0, so certainly in the first stage
    other   the rest
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from isthmus.cost import Problem
from isthmus.cost.blocks import BlockItem, Blocks
from isthmus.cost.network import FleetNetwork, Floats
from isthmus.planners.search.routes import ANY, Routes, State

TINY = 1e-9  # relative slack for rounding wherever a range is narrowed before the exact comparison
SMALL_TABLE = 100_000  # cells of a table up to which costs per pair of devices are kept between thresholds


@dataclass(frozen=True)
class Received:
    """Bytes per stage, [a, b - a - 1]. `empty` when nothing is ever received this way."""

    held: Floats  # per micro-batch in flight; those of the next two are as they are sent
    forward: Floats
    backward: Floats
    shared: Floats  # bytes of shared parameters, once per step
    shared_count: Floats

    @cached_property
    def has_shared(self) -> bool:
        return bool(self.shared.any())

    @cached_property
    def empty(self) -> bool:
        return not (self.has_shared or self.forward.any())


class StageTables:
    """The work, the messages and the memory of stages of at most `width` blocks.

    Tables are bands, `table[a, b - a - 1]`, so that a long model on many devices costs blocks x width, not blocks².
    """

    def __init__(self, blocks: Blocks, width: int | None = None) -> None:
        self.blocks = blocks
        self.count = blocks.count
        self.width = min(width or blocks.count, blocks.count)
        self.work = self._span(blocks.work)
        near, early, other = (self._received(kind) for kind in ("near", "early", "other"))
        self.near, self.early, self.other = Received(*near), Received(*early), Received(*other)
        self.total = Received(*map(_sum, zip(near, early, other, strict=True)))
        self.fixed_bytes = self._variables() + self._span(blocks.once)
        self.micro_batch_bytes = self._span(blocks.saved) + self.total.held

    def _span(self, cumulative: Floats) -> Floats:
        """cumulative[b] - cumulative[a]; stages past the end repeat the last block, and are never reached."""
        ends = np.minimum(np.arange(self.count)[:, None] + np.arange(1, self.width + 1), self.count)
        return cumulative[ends] - cumulative[: self.count, None]

    def _received(self, kind: str) -> list[Floats]:
        """Return the fields of `Received`, [a, b - a - 1] each. Fields of the same bytes are one table."""
        segments: list[tuple[int, int, int]] = []
        amounts: list[tuple[int, ...]] = []
        for item in self.blocks.items:
            once, each = (item.forward_bytes, 1), (item.held_bytes, item.forward_bytes, item.backward_bytes)
            found = _segments(item, kind)
            segments += found
            amounts += [(0, 0, 0, *once) if item.per_step else (*each, 0, 0)] * len(found)
        columns = list(zip(*amounts, strict=True)) or [()] * 5
        tables = {column: self._charged(segments, column) for column in dict.fromkeys(columns)}
        return [tables[column] for column in columns]

    def _variables(self) -> Floats:
        segments: list[tuple[int, int, int]] = []
        amounts: list[int] = []
        for variable in self.blocks.variables:
            starts = (0, *(use + 1 for use in variable.uses[:-1]))
            segments += [(start, use, use) for start, use in zip(starts, variable.uses, strict=True)]
            amounts += [variable.owned_bytes, *[variable.user_bytes] * (len(variable.uses) - 1)]
        return self._charged(segments, amounts)

    def _charged(self, segments: Sequence[tuple[int, int, int]], amounts: Sequence[int]) -> Floats:
        """Stages that start in first..last pay the amount of (first, last, use) once they reach past block `use`. A
        table of zeros takes no memory."""
        if not any(amounts):
            return np.broadcast_to(0.0, (self.count, self.width))
        table = np.zeros((self.count, self.width))
        for (first, last, use), amount in zip(segments, amounts, strict=True):
            starts = np.arange(max(first, use - self.width + 1), last + 1)
            table[starts, use - starts] += amount
        return np.cumsum(table, axis=1, out=table)


def _sum(tables: Sequence[Floats]) -> Floats:
    """One of zeros is left out: the sum of one table is that table."""
    return reduce(np.add, [table for table in tables if table.strides != (0, 0)] or tables[:1])


def _segments(item: BlockItem, kind: str) -> list[tuple[int, int, int]]:
    """(first, last, use): for stages that start in first..last, `use` is the next block that takes the item."""
    found: list[tuple[int, int, int]] = []
    start = item.made_in + 1
    near = start - 1 if item.per_step else start  # a shared parameter has no bottleneck term to sharpen
    for use in item.uses:
        first, last = start, use
        start = use + 1
        if kind == "near":
            last = min(last, near)
        else:
            first = max(first, near + 1)
            if (item.made_in == 0) != (kind == "early"):
                continue
        if first <= last:
            found.append((first, last, use))
    return found


class Path(NamedTuple):
    """Devices by number, and the block boundaries between them."""

    devices: tuple[int, ...]
    cut: tuple[int, ...]


class PathCost(NamedTuple):
    """A pipeline, or the beginning of one, whose end then is part of the cut."""

    sum_s: float  # fill + shared
    bottleneck_s: float
    path: Path
    shared_s: float = 0.0  # the part of the sum that is paid once per step


class Relaxation:
    """One problem on one set of routes.

    A stage must have memory for the micro-batches of the classic schedule; or, with `throttled`, for as many as
    hide its round trip behind the threshold, be they more or fewer. The round trip from a stage to the end and back
    is what this programme minimises from the end on, so that stays one pass. Then it leaves shared parameters
    out, which are no part of a round trip, and takes messages to different stages one after another: `throttled`
    is a heuristic for graphs that have either.

    Two stages on one device are each held against threshold and memory by itself: what is found bounds from below.
    """

    def __init__(
        self, problem: Problem, network: FleetNetwork, tables: StageTables, routes: Routes, *, throttled: bool = False
    ) -> None:
        self.problem = problem
        self.throttled = throttled
        self.network = network
        self.tables = tables
        self.routes = routes
        self._small = tables.count * tables.width <= SMALL_TABLE
        self._kept: dict[Hashable, Floats] = {}
        self._cheapest: dict[tuple[int, int], tuple[float, ...]] = {}
        self._last_start = tables.blocks.last_start
        self._member_speed = float(sum(network.speed[d] for d in routes.members))
        self.threshold = 0.0
        self._reach: list[int] = []
        # Infinities behind the last boundary let a window of stage ends run past it.
        padded = np.full((len(routes.states), tables.count + 1 + tables.width), np.inf)
        self.values = padded[:, : tables.count + 1]
        """[state, boundary]: least cost from there to the end under the last threshold solved."""
        self._windows = sliding_window_view(padded, tables.width, axis=1)
        self._allowed: dict[tuple[int, int, bool, int], Floats] = {}

    def in_flight(self, remaining: int) -> int:
        """Micro-batches that the next stage must hold when `remaining` stages are to come, itself included."""
        if self.throttled:
            return 1
        if self.problem.schedule == "gpipe":
            return self.problem.micro_batches
        most = len(self.routes.members) + self.routes.returns if remaining == ANY else remaining
        return min(self.problem.micro_batches, most)

    def solve(self, threshold: float) -> PathCost | None:
        """The least sum under `threshold`, and a pipeline that attains it; None where no pipeline keeps to it."""
        self.threshold = threshold
        self._allowed = {}
        self._reach = [self._widest(float(speed)) for speed in self.network.speed]
        count = self.tables.count
        self.values[:] = np.inf
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

    def _widest(self, speed: float) -> int:
        """Most blocks that a device of this speed computes within the threshold."""
        if not np.isfinite(self.threshold):
            return self.tables.width
        work = self.tables.blocks.work
        ends = np.searchsorted(work, work * (1 + TINY) + self.threshold * speed * (1 + TINY), "right")
        return min(self.tables.width, max(1, int((ends - np.arange(len(work))).max())))

    def _follow(self, number: int) -> PathCost:
        total = float(self.values[number][0])
        start, devices, cut, bottleneck = 0, list[int](), list[int](), 0.0
        while start < self.tables.count:
            rows = [self.row(number, device, after, start) for device, after in self.routes.steps[number]]
            choice = min(range(len(rows)), key=lambda i: float(rows[i].min()))
            device, after = self.routes.steps[number][choice]
            state, offset = self.routes.states[number], int(rows[choice].argmin())
            busy = self._bottleneck(state.last, device, _only(state), start, start + 1)
            end = start + offset + 1
            round_trip_s = float(self.values[after, end] + self.tables.work[start, offset] / self.network.speed[device])
            bottleneck = max(bottleneck, float(busy[0, offset]), self.throttle_s(device, start, end, round_trip_s))
            start, number = end, after
            devices.append(device)
            cut.append(start)
        return PathCost(total, bottleneck, Path(tuple(devices), tuple(cut[:-1])))

    def _rows(self, state: State) -> tuple[int, int]:
        """Boundaries that the devices used so far can have reached, and from which the others can finish."""
        if state.used == 0:
            return 0, 1
        count, work = self.tables.count, self.tables.blocks.work
        if not np.isfinite(self.threshold):
            return 1, count
        used = sum(float(self.network.speed[d]) for d in self.routes.members if state.used >> d & 1)
        slack = TINY * work[-1]
        left = self._member_speed - used + (float(self.network.speed[state.first]) if self.routes.returns else 0.0)
        low = int(np.searchsorted(work, work[-1] - self.threshold * left - slack, "left"))
        high = int(np.searchsorted(work, self.threshold * used + slack, "right"))
        return max(1, low), min(high, count)

    def _totals(self, state: State, device: int, after: int, low: int, high: int) -> Floats:
        ends = slice(self._reach[device])
        total = self._windows[after, low + 1 : high + 1, ends] + self._base(state, device, low, high)[:, ends]
        if self.throttled:
            total[~self._round_trip_fits(device, after, low, high)] = np.inf
        if state.last < 0 or _only(state):
            return total
        if not self.tables.early.empty:
            # What the first stage sends, at its true price.
            key, early = ("early", state.first, device), self.tables.early
            messages = self._table(key, lambda rows: self._messages(early, state.first, device, rows), low, high)
            total += messages[:, ends]
        if not self.tables.other.empty:
            total += self._other_cost(state.used, device, low, high)[:, ends]
        return total

    def _round_trip_fits(self, device: int, after: int, low: int, high: int) -> NDArray[np.bool_]:
        """Return whether the device holds the micro-batches that hide the round trip behind the threshold."""
        tables, ends = self.tables, slice(self._reach[device])
        compute = tables.work[low:high, ends] / self.network.speed[device]
        round_trip_s = self._windows[after, low + 1 : high + 1, ends] + compute
        most = self.threshold * self.problem.micro_batches  # all of them in flight: nothing left to throttle
        held = np.ceil(np.minimum(round_trip_s, most) / self.threshold * (1 - TINY)) if np.isfinite(most) else 1.0
        held = np.maximum(held, 1.0)
        need = tables.fixed_bytes[low:high, ends] + held * tables.micro_batch_bytes[low:high, ends]
        return need <= self.network.memory[device]

    def throttle_s(self, device: int, start: int, end: int, round_trip_s: float) -> float:
        """The period that the memory of a stage forces: a round trip per micro-batch that it can hold."""
        if not self.throttled:
            return 0.0
        cell = start, end - start - 1
        free = float(self.network.memory[device] - self.tables.fixed_bytes[cell])
        each = float(self.tables.micro_batch_bytes[cell])
        count = self.problem.micro_batches
        held = min(count, int(free // each)) if each else count
        return round_trip_s / max(1, held) if held < count else 0.0

    def _table(self, key: Hashable, make: Callable[[slice], Floats], low: int, high: int) -> Floats:
        """Rows of a table that depends on `key` only: made once and kept where tables are small."""
        if not self._small:
            return make(slice(low, high))
        if key not in self._kept:
            self._kept[key] = make(slice(0, self.tables.count))
        return self._kept[key][low:high]

    def _base(self, state: State, device: int, low: int, high: int) -> Floats:
        """Cost of the stage and of what the stage before sends it; infinite where threshold or memory forbid it."""
        held, only = self.in_flight(state.remaining), _only(state)

        def make(low: int, high: int) -> Floats:
            allowed = self._bottleneck(state.last, device, only, low, high) <= self.threshold
            allowed &= self.fits(device, held, low, high)
            late = np.arange(max(low, self._last_start + 1), high)  # where a last stage may not start
            late = late[self.tables.count - late <= self.tables.width]
            allowed[late - low, self.tables.count - late - 1] = False
            return np.where(allowed, self._cost(state.last, device, only, low, high), np.inf)

        if not self._small:
            return make(low, high)
        key = (state.last, device, only, held)
        if key not in self._allowed:
            self._allowed[key] = make(0, self.tables.count)
        return self._allowed[key][low:high]

    def fits(self, device: int, held: int, low: int, high: int) -> NDArray[np.bool_]:
        """Return which stages that start in low..high-1 fit the device with `held` micro-batches in flight."""

        def need(rows: slice) -> Floats:
            return self.tables.fixed_bytes[rows] + held * self.tables.micro_batch_bytes[rows]

        return self._table(("memory", held), need, low, high) <= self.network.memory[device]

    def _bottleneck(self, last: int, device: int, only: bool, low: int, high: int) -> Floats:
        """The longest that the stage, or a link from the stage before, is busy."""
        received, net = self.tables.total if only else self.tables.near, self.network

        def make(rows: slice) -> Floats:
            compute = self.tables.work[rows] / net.speed[device]
            if last < 0:
                return compute
            there = received.forward[rows] * net.byte_s[last, device]
            return np.maximum(compute, np.maximum(there, received.backward[rows] * net.byte_s[device, last]))

        return self._table(("bottleneck", last, device, only), make, low, high)

    def _cost(self, last: int, device: int, only: bool, low: int, high: int) -> Floats:
        """Return the stage's summand: compute, and the messages of the stage before."""
        received = self.tables.total if only else self.tables.near

        def make(rows: slice) -> Floats:
            compute = self.tables.work[rows] / self.network.speed[device]
            return compute if last < 0 else compute + self._messages(received, last, device, rows)

        return self._table(("cost", last, device, only), make, low, high)

    def _messages(self, received: Received, source: int, device: int, rows: slice) -> Floats:
        """Both transfers of an edge, and those of the shared parameters that its source owns."""
        net = self.network
        there = received.forward[rows] * net.byte_s[source, device]
        back = received.backward[rows] * net.byte_s[device, source]
        cost = there + back
        cost += (there > 0) * net.latency[source, device] + (back > 0) * net.latency[device, source]
        if received.has_shared and not self.throttled:
            cost += received.shared_count[rows] * (net.latency[source, device] + net.latency[device, source])
            cost += received.shared[rows] * (net.byte_s[source, device] + net.byte_s[device, source])
        return cost

    def _other_cost(self, used: int, device: int, low: int, high: int) -> Floats:
        """Everything else, from whichever earlier device is cheapest; latency may already have been paid."""
        if (used, device) not in self._cheapest:
            net = self.network
            before = [d for d in self.routes.members if used >> d & 1]
            there, back = net.byte_s[before, device], net.byte_s[device, before]
            latency = net.latency[before, device] + net.latency[device, before]
            self._cheapest[used, device] = tuple(float(x.min()) for x in (there, back, there + back, latency))
        rates, other = self._cheapest[used, device], self.tables.other

        def make(rows: slice) -> Floats:
            cost = other.forward[rows] * rates[0] + other.backward[rows] * rates[1]
            if other.has_shared and not self.throttled:
                cost += other.shared[rows] * rates[2] + other.shared_count[rows] * rates[3]
            return cost

        return self._table(("other", rates), make, low, high)


def _only(state: State) -> bool:
    """Return whether one stage is all there is before: then every value comes from it, and nothing is relaxed."""
    return state.used != 0 and state.first == state.last
