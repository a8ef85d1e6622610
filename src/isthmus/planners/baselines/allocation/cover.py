"""Is a limit within reach? The integer programme that covers the layers with one window per device.

Written as a walk from boundary 0 to the last one: a window goes forward, and steps back by one layer are free, because
windows may overlap. Prices thin the windows out beforehand: one that loses more than the budget of `packing` is in no
solution, so what is infeasible without it is infeasible.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from scipy.sparse import csr_matrix

from isthmus.cost.network import Floats
from isthmus.planners.baselines.allocation.problem import LayerProblem
from isthmus.planners.baselines.allocation.windows import Windows, ordered, reach, windows
from isthmus.planners.highs import integer_programme
from isthmus.planners.observer import looked_at


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
    before = np.concatenate(([0.0], np.cumsum(prices)))
    earned = before[ends] - before[:-1]
    dearest = earned.max(axis=1)
    # A millionth of the whole, lest rounding in the prices drop a window that is needed.
    budget = float(dearest.sum() - before[-1]) + 1e-6 * float(before[-1])
    return None if budget < 0 else windows(ends, dearest[:, None] - earned <= budget)
