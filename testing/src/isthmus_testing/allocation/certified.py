"""The smallest largest workload over every order of the devices, with a proven lower bound.

Identical layers are counted, exactly. Otherwise prices on layers prove a bound (`best_prices`), and limits between it
and the best allocation known are tried: a beam search looks for an order (`pack`), then swaps of devices do (`anneal`),
then an integer programme for a cover, or for the proof that there is none (`cover`). Whatever order is found is cut
exactly (`best_cut`).

Searches for an order of devices whose maximal windows, one after the other, reach the end within a limit.

*Packing* is a beam search that prices guide. Every device that is placed loses something against its dearest window.
All losses together may not exceed the budget that the limit leaves: the sum of the dearest windows less the price of
all layers. States that used the same devices differ only in how far they came, so the furthest one stands for all.

*Annealing* repairs where packing regrets nothing: it swaps devices in a full order and sees how much of the work that
covers. Where devices hold few layers each, an order within 0.2 % of the bound may exist that no beam keeps.

*Cover* asks whether the limit is within reach at all: the integer programme that covers the layers with one window per
device. Written as a walk from boundary 0 to the last one: a window goes forward, and steps back by one layer are free,
because windows may overlap. Prices thin the windows out beforehand: one that loses more than the budget of packing is
in no solution, so what is infeasible without it is infeasible.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from enum import Enum

import numpy as np
from scipy.sparse import csr_matrix

from isthmus.cost.kernel import Floats, Ints
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation, too_small
from isthmus.planners.baselines.allocation.sky import best_in_order, pooled_bound_s, reach
from isthmus.planners.highs import integer_programme
from isthmus.planners.observer import SearchStopped, looked_at
from isthmus.units import format_size
from isthmus_testing.allocation.windows import (
    Windows,
    best_cut,
    best_prices,
    earned,
    ordered,
    priced_bound_s,
    windows,
    work_prices,
)

MOST_STATES = 300
MOST_EXPANDED = 4_000_000  # states x devices x devices of one search: it is narrower where there are more devices


def pack(problem: LayerProblem, prices: Floats, limit_s: float) -> list[int] | None:
    """Devices in an order that reaches the end within the limit, or None where the beam lost all its states."""
    ends = reach(problem, limit_s)
    before = np.concatenate(([0.0], np.cumsum(prices)))
    dearest = (before[ends] - before[:-1]).max(axis=1)
    budget = float(dearest.sum() - before[-1]) + 1e-9 * float(before[-1])
    width = max(1, min(MOST_STATES, MOST_EXPANDED // problem.devices**2))
    names = np.random.default_rng(0).integers(1, 1 << 62, problem.devices)
    position, used = np.zeros(1, dtype=np.int64), np.zeros((1, problem.devices), dtype=bool)
    key = np.zeros(1, dtype=np.int64)
    chosen = np.zeros((1, 0), dtype=np.int64)
    for _ in range(problem.devices):
        looked_at(len(position))
        after = ends[:, position].T
        after[used] = 0
        done = np.argwhere(after == problem.layers)
        if len(done):
            return [*chosen[done[0, 0]].tolist(), int(done[0, 1])]
        # What the devices used could have earned at best, less what they did earn: the price of all layers so far.
        lost = (used @ dearest)[:, None] + dearest - before[after]
        state, device = np.nonzero((lost <= budget) & (after > position[:, None]))
        if not len(state):
            return None
        keep = _best(key[state] ^ names[device], lost[state, device], width)
        state, device = state[keep], device[keep]
        used = used[state]
        used[np.arange(len(state)), device] = True
        position, key = after[state, device], key[state] ^ names[device]
        chosen = np.column_stack((chosen[state], device))
    return None


def _best(keys: Ints, lost: Floats, width: int) -> Ints:
    """The `width` entries that lost least, one for each set of devices."""
    by_set = np.lexsort((lost, keys))
    first = np.ones(len(keys), dtype=bool)
    first[1:] = keys[by_set[1:]] != keys[by_set[:-1]]
    kept = by_set[first]
    return kept[np.argsort(lost[kept], kind="stable")[:width]]


SWAPS = 64  # pairs tried at once; the best of them is taken or left
MOST_STEPS = 250_000  # rounds x devices of one search
HEAT = 0.3  # share of one device's part of the work that a step may lose at first


def anneal(problem: LayerProblem, limit_s: float, seed: int) -> list[int] | None:
    """Devices in an order whose maximal windows reach the end within the limit; None where none was found."""
    rng = np.random.default_rng(seed)
    ends = np.column_stack((reach(problem, limit_s), np.full(problem.devices, problem.layers)))
    work = problem.flops_before
    order = rng.permutation(problem.devices)
    covered = float(work[_covered(ends, order[None])[0]])
    rounds = MOST_STEPS // problem.devices
    each = np.arange(SWAPS)
    for heat in HEAT * float(work[-1]) / problem.devices * np.linspace(1.0, 0.0, rounds, endpoint=False):
        looked_at(SWAPS)
        first, second = rng.integers(0, problem.devices, (2, SWAPS))
        offers = np.repeat(order[None], SWAPS, axis=0)
        offers[each, first], offers[each, second] = order[second], order[first]
        reached = _covered(ends, offers)
        if reached.max() == problem.layers:
            return offers[reached.argmax()].tolist()
        # Noise among the offers keeps equal ones from always losing to the first.
        best = int(np.argmax(work[reached] + HEAT * heat * rng.exponential(size=SWAPS)))
        change = float(work[reached[best]]) - covered
        if change >= 0 or rng.random() < np.exp(change / heat):
            order, covered = offers[best], covered + change
    return None


def _covered(ends: Ints, orders: Ints) -> Ints:
    """[orders]: the layer that each order of all devices gets to. Row d, column j of `ends`: where d gets to from j."""
    reached = np.zeros(len(orders), dtype=np.int64)
    for devices in orders.T:
        reached = ends[devices, reached]
    return reached


class CoverResult(Enum):
    IMPOSSIBLE = "no allocation is within the limit"
    UNKNOWN = "the solver ran out of work"


def cover(problem: LayerProblem, prices: Floats, limit_s: float) -> list[int] | CoverResult:
    """Devices by the start of their windows where some cover the layers within the limit; HiGHS's verdict otherwise."""
    looked_at()
    chosen = affordable(problem, prices, limit_s)
    if chosen is None:
        return CoverResult.IMPOSSIBLE
    layers, count = problem.layers, len(chosen.start)
    forward, back = np.arange(count), np.arange(layers)
    row = np.concatenate((chosen.start, chosen.end, layers + 1 + chosen.device, back + 1, back))
    column = np.concatenate((forward, forward, forward, count + back, count + back))
    value = np.concatenate((np.repeat([1.0, -1.0, 1.0], count), np.repeat([1.0, -1.0], layers)))
    flow = np.zeros(layers + 1)
    flow[[0, -1]] = 1.0, -1.0
    low = np.concatenate((flow, np.full(problem.devices, -np.inf)))
    high = np.concatenate((flow, np.ones(problem.devices)))
    matrix = csr_matrix((value, (row, column)), shape=(layers + 1 + problem.devices, count + layers))
    found = integer_programme(np.zeros(count + layers), (matrix, low, high), np.repeat([1, 0], [count, layers]))
    if found.x is not None:
        taken = found.x[:count] > 0.5
        return ordered(Windows(*(column[taken] for column in chosen)))
    return CoverResult.IMPOSSIBLE if found.status == 2 else CoverResult.UNKNOWN


def affordable(problem: LayerProblem, prices: Floats, limit_s: float) -> Windows | None:
    """The maximal windows that a solution may use; None where the prices already refute the limit."""
    ends = reach(problem, limit_s)
    of_windows = earned(prices, ends)
    dearest, whole = of_windows.max(axis=1), float(np.cumsum(prices)[-1])
    # A millionth of the whole, lest rounding in the prices drop a window that is needed.
    budget = float(dearest.sum() - whole) + 1e-6 * whole
    return None if budget < 0 else windows(ends, dearest[:, None] - of_windows <= budget)


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
        """Return whether the limit is settled, one way or the other."""
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
    """Return whether one layer is like another in work, memory and what it receives."""
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
