"""Ours: the smallest largest workload over every order of the devices, with a proven lower bound.

Identical layers are counted, exactly. Otherwise prices on layers prove a bound (`best_prices`), and limits between it
and the best allocation known are tried: a beam search looks for an order (`pack`), then swaps of devices do (`anneal`),
then an integer programme for a cover, or for the proof that there is none (`cover`). Whatever order is found is cut
exactly (`best_cut`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np

from isthmus.cost.kernel import Ints
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.order_searches import CoverResult, anneal, cover, pack
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation, too_small
from isthmus.planners.baselines.allocation.sky import best_in_order
from isthmus.planners.baselines.allocation.windows import (
    best_cut,
    best_prices,
    pooled_bound_s,
    priced_bound_s,
    work_prices,
)
from isthmus.planners.observer import SearchStopped
from isthmus.units import format_size

TOLERANCE = 1e-4  # the gap at which the search on large problems ends
EXACT_CELLS = 8_000  # devices x layers up to which it goes on until the optimum is proven
PRICED_CELLS = 50_000  # up to which prices come from linear programmes, and covers from integer programmes
TABLE_CELLS = 2_000_000  # up to which tables over both are made at all
EXACT = 1e-9
ANNEALINGS = 3  # searches by swaps for each limit
MOST_UNKNOWN = 3  # limits on which the solver may run out of work


def certified_layers(problem: LayerProblem) -> Allocation:
    """The least largest workload found, and the bound that was proven for any order of any of the devices.

    Never above `best_in_order`: the best cut of the order given is where the search begins. Raises FleetTooSmall.
    """
    if identical(problem):
        return identical_layers(problem)
    if problem.devices * problem.layers > TABLE_CELLS:
        best = best_in_order(problem)
        return allocation(problem, best.order, best.counts, pooled_bound_s(problem))
    return _LayerSearch(problem).run()


class _LayerSearch:
    """The interval between what is proven out of reach and the best allocation found."""

    def __init__(self, problem: LayerProblem) -> None:
        cells = problem.devices * problem.layers
        self.problem = problem
        self.exact = cells <= EXACT_CELLS
        self.programmes = cells <= PRICED_CELLS
        self.prices = work_prices(problem)
        self.bound_s = pooled_bound_s(problem)
        self.tried_s = 0.0  # the largest limit at which nothing was found and nothing proven
        self.best = self._first()

    def run(self) -> Allocation:
        with contextlib.suppress(SearchStopped):  # the best allocation and the bound stand at any time
            self._narrow()
        best = self.best
        return allocation(self.problem, best.order, best.counts, self.bound_s)

    def _narrow(self) -> None:
        if self.programmes:
            self.prices, self.bound_s = best_prices(self.problem, self.bound_s, self.best.workload_s)
        else:
            self.bound_s = priced_bound_s(self.problem, self.prices, self.bound_s, self.best.workload_s)
        self._pack(self.bound_s * (1 + TOLERANCE / 2))
        # On a small problem the integer programme is quicker than swaps, and proves what it does not find.
        steps = [self._pack, self._cover, self._anneal] if self.exact else [self._pack, self._anneal, self._cover]
        unknown = 0
        while unknown < MOST_UNKNOWN and (limit_s := self._next_limit_s()):
            if not any(step(limit_s) for step in steps):
                self.tried_s = limit_s
                unknown += self.programmes

    def _next_limit_s(self) -> float:
        """Half-way, then just below the best allocation; 0 where nothing is left to do."""
        floor_s, best_s = max(self.bound_s, self.tried_s), self.best.workload_s
        if best_s > floor_s * (1 + TOLERANCE):
            return (floor_s + best_s) / 2
        below_s = best_s * (1 - EXACT / 2)
        return below_s if self.exact and floor_s < below_s else 0.0

    def _pack(self, limit_s: float) -> bool:
        order = pack(self.problem, self.prices, limit_s) if limit_s < self.best.workload_s else None
        return order is not None and self._take(order, limit_s)

    def _anneal(self, limit_s: float) -> bool:
        orders = (anneal(self.problem, limit_s, seed) for seed in range(ANNEALINGS))
        return any(order is not None and self._take(order, limit_s) for order in orders)

    def _cover(self, limit_s: float) -> bool:
        """Whether the limit is settled, one way or the other."""
        if not self.programmes:
            return False
        found = cover(self.problem, self.prices, limit_s)
        if found is CoverResult.IMPOSSIBLE:
            self.bound_s = limit_s
        return found is CoverResult.IMPOSSIBLE or (isinstance(found, list) and self._take(found, limit_s))

    def _take(self, order: Sequence[int], limit_s: float) -> bool:
        found = best_cut(self.problem, order, self.bound_s, limit_s)
        if found is None:
            return False
        self.best = found
        return True

    def _first(self) -> Allocation:
        """The best cut of the order given, or of the one by memory, or of any that holds the layers."""
        problem = self.problem
        slowest_s = float(problem.device_s_per_flop.max() * problem.flops_before[-1])
        limit_s = 2 * (slowest_s + float(problem.received_table_s.max()))
        by_memory = np.argsort(-problem.memory_end_table[:, 0], kind="stable")
        for order in (range(problem.devices), by_memory.tolist()):
            found = best_cut(problem, order, self.bound_s, limit_s)
            if found is not None:
                return found
        order = cover(problem, np.zeros(problem.layers), limit_s) if self.programmes else None
        found = best_cut(problem, order, self.bound_s, limit_s) if isinstance(order, list) else None
        if found is None:
            raise _nothing_fits(problem, proven=order is CoverResult.IMPOSSIBLE)
        return found


def _nothing_fits(problem: LayerProblem, *, proven: bool) -> FleetTooSmall:
    ends = problem.memory_end_table.max(axis=0)
    unassigned = np.flatnonzero(ends <= np.arange(problem.layers))
    if len(unassigned):
        layer = int(unassigned[0])
        return too_small(problem, int(problem.device_memory_bytes.argmax()), layer, layer + 1)
    short = float(problem.memory_before[-1] - problem.device_memory_bytes.sum())
    reason = "whole layers do not go into what they have"
    if short > 0:
        reason = f"{format_size(math.ceil(short))} short in all"
    verb = "holds" if proven else "was found that holds"
    return FleetTooSmall(f"no order of the devices {verb} the layers: {reason}")


def identical(problem: LayerProblem) -> bool:
    """Whether one layer is like another in work, memory and what it receives."""
    columns = [problem.layer_flops, problem.layer_memory_bytes]
    if problem.transfers is not None:
        columns.append(problem.transfers.boundary_bytes)
    work = float(problem.layer_flops[0])
    return work > 0 and problem.memory_reach is None and all(bool((c == c[0]).all()) for c in columns)


def identical_layers(problem: LayerProblem) -> Allocation:
    """The exact optimum, for ten thousand devices in milliseconds; devices that get layers stay in the order given.

    Within a limit T a device takes min(cap_d, floor((T - lat_d) / (s_d f))) layers, whatever the others do; T is enough
    exactly where these add up to all layers. Bisection on T ends between two neighbouring floats. Raises FleetTooSmall.
    """
    devices = np.arange(problem.devices)
    room = problem.memory_end(devices, np.zeros_like(devices))
    missing = problem.layers - int(room.sum())
    if missing > 0:
        raise FleetTooSmall(
            f"{problem.layers} equal layers of {format_size(math.ceil(problem.layer_memory_bytes[0]))}: the devices "
            f"hold {problem.layers - missing} of them, so {missing} are without a place"
        )
    one_layer_s = problem.device_s_per_flop * problem.layer_flops[0] + problem.received_s(devices, 0)
    low_s, high_s = 0.0, float(one_layer_s.max())
    while int(_within(problem, room, high_s).sum()) < problem.layers:
        low_s, high_s = high_s, 2 * high_s
    while low_s < (middle_s := (low_s + high_s) / 2) < high_s:
        enough = int(_within(problem, room, middle_s).sum()) >= problem.layers
        low_s, high_s = (low_s, middle_s) if enough else (middle_s, high_s)
    counts = _within(problem, room, high_s)
    # One float lower the layers do not fit: what is too much now is on devices that are exactly at the limit.
    at_limit = np.flatnonzero(counts > _within(problem, room, math.nextafter(high_s, 0.0)))
    counts[at_limit[: int(counts.sum()) - problem.layers]] -= 1
    return allocation(problem, devices.tolist(), counts.tolist(), high_s)


def _within(problem: LayerProblem, room: Ints, limit_s: float) -> Ints:
    """[devices]: layers within the limit, at most `room`; the quotient is only a guess, the workload decides."""
    devices = np.arange(problem.devices)
    received_s = problem.received_s(devices, 0)
    left_s = np.maximum(limit_s - (received_s if problem.transfers is None else 0.0), 0.0)
    guess = np.minimum(left_s / (problem.device_s_per_flop * problem.layer_flops[0]), room).astype(np.int64)
    counts = np.minimum(guess + 1, room)
    for _ in range(2):
        counts -= problem.workload_s(devices, 0, counts) > limit_s
    return np.where(received_s <= limit_s, counts, 0)
