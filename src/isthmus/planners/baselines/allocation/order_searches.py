"""Searches for an order of devices whose maximal windows, one after the other, reach the end within a limit.

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

from enum import Enum

import numpy as np
from scipy.sparse import csr_matrix

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.baselines.allocation.problem import LayerProblem
from isthmus.planners.baselines.allocation.windows import Windows, earned, ordered, reach, windows
from isthmus.planners.highs import integer_programme
from isthmus.planners.observer import looked_at

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
