"""Minimise `sum + (n - 1) * bottleneck` exactly, by searching over thresholds for the bottleneck.

Let m(B) be the least sum of all pipelines whose bottleneck is at most B. A solution found at threshold B with
bottleneck b <= B proves that nothing in [b, B] has a smaller sum, so that interval is closed. An open interval
(low, high) cannot beat the best plan known once

    m(high) + (n - 1) * low >= best

Intervals are taken best bound first. The first phase closes them with the relaxation; the second looks, exactly, into
those that the relaxation left below the best plan, because values skip stages there.

A value goes directly from the stage that made it to every stage that takes it, so what a stage costs depends on who
holds each live value. That holder list is the label of a search state. For a plain chain it is always "the stage
before"; with skip connections few labels are within reach of the best plan known, because the relaxation bounds what is
still to be paid:

    reached[after][end, label'] = min over (start, label) of reached[before][start, label] + compute + messages

and a state is left out where its sum and `relaxation.values[after][end]` reach the best plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from isthmus.cost import kernel
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Trials, timed
from isthmus.planners.observer import looked_at
from isthmus.planners.search.relaxation import Path, PathCost, Relaxation

Label = tuple[int, ...]  # the device that holds each item of `Blocks.live[boundary]`, in that order


class SearchTooLarge(Exception):
    """The search gave up after its budget of states."""


def stage_cost(
    blocks: Blocks, network: FleetNetwork, label: Label, start: int, end: int, device: int
) -> tuple[float, float]:
    """Return the summand of the stage [start, end) on `device`, and the longest it keeps itself or a link busy."""
    total = bottleneck = float(blocks.work[end] - blocks.work[start]) / float(network.speed[device])
    messages: dict[int, list[int]] = {}  # bytes exchanged with each holder, forward and backward
    shared = 0.0
    for (number, use), holder in zip(blocks.live[start], label, strict=True):
        if use >= end:
            continue
        item = blocks.items[number]
        if item.per_step:
            shared += network.message_s(holder, device, item.forward_bytes)
            shared += network.message_s(device, holder, item.backward_bytes)
        else:
            message = messages.setdefault(holder, [0, 0])
            message[0] += item.forward_bytes
            message[1] += item.backward_bytes
    for holder, (forward, backward) in messages.items():
        total += network.message_s(holder, device, forward) + network.message_s(device, holder, backward)
        wires = forward * network.byte_s[holder, device], backward * network.byte_s[device, holder]
        bottleneck = max(bottleneck, float(wires[0]), float(wires[1]))
    return total + shared, bottleneck


def next_label(blocks: Blocks, label: Label, start: int, end: int, device: int) -> Label:
    held = {number: holder for (number, _), holder in zip(blocks.live[start], label, strict=True)}
    return tuple(held.get(number, device) for number, _ in blocks.live[end])


def objective(relaxation: Relaxation, path: Path) -> PathCost:
    """Return the cost that the relaxation bounds: exact, or throttled, whose sum leaves shared parameters out."""
    blocks, network, problem = relaxation.tables.blocks, relaxation.network, relaxation.problem
    table = cut_table(blocks, np.array([(0, *path.cut, blocks.count)]))
    row = timed(problem, network, Trials(table, np.zeros(1, dtype=np.int64), np.array([path.devices])))
    fill_s, busy_s, shared_s = float(row.fill_s[0]), float(row.busy_s[0]), float(row.shared_s[0])
    if not relaxation.throttled:
        return PathCost(fill_s, busy_s, path, shared_s)
    period_s = kernel.period_s(row.busy_s, row.round_trip_s, row.held, problem.micro_batches)
    return PathCost(fill_s - shared_s, float(period_s[0]), path, shared_s)


def least_sum(
    relaxation: Relaxation, threshold_s: float, cutoff_s: float, most_states: int
) -> tuple[PathCost | None, int]:
    """The least sum below `cutoff_s` with a bottleneck up to `threshold_s`, and how many states were expanded.

    None where no pipeline is below. The relaxation must hold the bounds of this threshold or of a larger one.
    Raises SearchTooLarge beyond `most_states`.
    """
    blocks, network, routes = relaxation.tables.blocks, relaxation.network, relaxation.routes
    reached: list[dict[tuple[int, Label], PathCost]] = [{} for _ in routes.states]
    for root in routes.roots:
        reached[root][0, ()] = PathCost(0.0, 0.0, Path((), ()))
    best: PathCost | None = None
    expanded = 0
    for number, steps in enumerate(routes.steps):
        for (start, label), entry in reached[number].items():
            if start == blocks.count:
                if routes.may_end(number) and entry.sum_s < cutoff_s:
                    cutoff_s, path = entry.sum_s, entry.path
                    best = entry._replace(path=path._replace(cut=path.cut[:-1]))
                continue
            expanded += 1
            if expanded > most_states:
                raise SearchTooLarge
            looked_at()
            # reached[after][end] = min over starts of reached[number][start] + compute + messages, label by label
            for device, after in steps:
                bounds = relaxation.row(number, device, after, start) + entry.sum_s
                for offset in np.flatnonzero(bounds < cutoff_s):
                    end = start + int(offset) + 1
                    stage_s, busy_s = stage_cost(blocks, network, label, start, end, device)
                    sum_s, to_go = entry.sum_s + stage_s, float(relaxation.values[after][end])
                    if busy_s > threshold_s or sum_s + to_go >= cutoff_s:
                        continue
                    key = (end, next_label(blocks, label, start, end, device))
                    known = reached[after].get(key)
                    if known is None or sum_s < known.sum_s:
                        path = Path((*entry.path.devices, device), (*entry.path.cut, end))
                        reached[after][key] = PathCost(sum_s, max(entry.bottleneck_s, busy_s), path)
    return best, expanded


TOLERANCE = 1e-9  # relative; below it two step times are the same
NARROW = 0.1  # relative width below which an open interval is probed at its top, not at its middle


class Budget(NamedTuple):
    """Where a search stops; what is left open then shows in its lower bound. Counts, so that results repeat."""

    probes: int = 300
    states: int = 20_000


AMPLE = Budget()


class Interval(NamedTuple):
    """Pipelines with a bottleneck in low..high have at least this sum, and take at least `bound_s`."""

    bound_s: float
    low: float
    high: float
    sum_s: float


@dataclass
class ThresholdSearch:
    """The best pipeline of the relaxation's routes, and a proven lower bound on all of them.

    `upper_s` is a step time already known from elsewhere: what cannot beat it is not looked at.
    """

    relaxation: Relaxation
    micro_batches: int
    upper_s: float = float("inf")
    budget: Budget = AMPLE
    best: PathCost | None = None
    probes: int = 0
    states: int = 0
    unresolved: list[Interval] = field(default_factory=list[Interval])
    _open: list[Interval] = field(default_factory=list[Interval])

    def run(self) -> float:
        """Searches; returns the lower bound in seconds (infinite where no pipeline fits)."""
        gain, relaxation = self.micro_batches - 1, self.relaxation
        work = float(relaxation.tables.blocks.work[-1])
        speeds = [float(relaxation.network.speed[d]) for d in relaxation.routes.members]
        # All on the fastest; all on the joint speed, or just below it, as intervals exclude their low end.
        least_s, low = work / max(speeds), work / sum(speeds) * (1 - TOLERANCE)
        high = (self.upper_s - least_s) / gain if gain else float("inf")
        self._push(low, high, least_s)
        # Nothing in an interval (low, high) takes less than m(high) + (n - 1) * low.
        while self._open and self._open[0].bound_s < self._goal() and self.probes < self.budget.probes:
            looked_at()
            self._probe(heapq.heappop(self._open))
        self.unresolved = [i for i in self.unresolved if i.bound_s < self._goal()]
        # The exact search does not know a device that comes twice: what is left open shows in the bound.
        if not relaxation.throttled and not relaxation.routes.returns:
            self._resolve()
        left = [i.bound_s for i in (*self._open, *self.unresolved)]
        return min([self.upper_s, *left])

    @property
    def step_s(self) -> float:
        """Return the time of the best pipeline, shared parameters included."""
        apart = self.best.shared_s if self.best and self.relaxation.throttled else 0.0
        return self.upper_s + apart

    def _goal(self) -> float:
        return self.upper_s * (1 - TOLERANCE)

    def _push(self, low: float, high: float, sum_s: float) -> None:
        if low < high:
            bound = kernel.step_s(sum_s, low, self.micro_batches)
            heapq.heappush(self._open, Interval(bound, low, high, sum_s))

    def _offer(self, found: PathCost) -> None:
        step_s = kernel.step_s(found.sum_s, found.bottleneck_s, self.micro_batches)
        if step_s < self.upper_s:
            self.upper_s, self.best = step_s, found

    def _probe(self, interval: Interval) -> None:
        """Solves the relaxation inside an open interval and splits it."""
        gain, low, high = self.micro_batches - 1, interval.low, interval.high
        if gain:  # above this no sum that the interval allows can win
            high = min(high, (self._goal() - interval.sum_s) / gain)
        if low >= high:
            return
        wide = high - low > NARROW * high
        threshold = (low + high) / 2 if wide and high < float("inf") else high
        self.probes += 1
        found = self.relaxation.solve(threshold)
        if threshold < high:
            self._push(threshold, high, interval.sum_s)
        if found is None:
            return
        self._offer(objective(self.relaxation, found.path))
        bound = kernel.step_s(found.sum_s, found.bottleneck_s, self.micro_batches)
        self.unresolved.append(Interval(bound, found.bottleneck_s, threshold, found.sum_s))
        self._push(low, found.bottleneck_s * (1 - TOLERANCE), found.sum_s)

    def _resolve(self) -> None:
        """Exact search in the intervals that the relaxation closed below the best plan. Stops at its budget."""
        gain = self.micro_batches - 1
        heapq.heapify(self.unresolved)
        solved = 0.0
        while self.unresolved and self.unresolved[0].bound_s < self._goal():
            looked_at()
            interval = self.unresolved[0]
            # Bounds of a slightly larger threshold serve as well, and are at hand.
            if not interval.high <= solved <= 1.05 * interval.high:
                solved = min(1.02 * interval.high, max(i.high for i in self.unresolved))
                self.relaxation.solve(solved)
            cutoff_s = self._goal() - gain * interval.low
            try:
                found, states = least_sum(self.relaxation, interval.high, cutoff_s, self.budget.states - self.states)
            except SearchTooLarge:
                return
            self.states += states
            heapq.heappop(self.unresolved)
            if found is not None:
                self._offer(found)
                high = found.bottleneck_s * (1 - TOLERANCE)
                if interval.low < high:
                    bound = found.sum_s + gain * interval.low
                    heapq.heappush(self.unresolved, Interval(bound, interval.low, high, found.sum_s))
