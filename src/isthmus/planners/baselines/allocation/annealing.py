"""Another way to an order that reaches the end: swap devices in a full order and see how much of the work it covers.

A beam search places devices one after the other and regrets nothing; this one repairs. Where devices hold few layers
each, an order within 0.2 % of the bound may exist that no beam keeps.
"""

from __future__ import annotations

import numpy as np

from isthmus.planners.baselines.allocation.problem import Ints, LayerProblem
from isthmus.planners.baselines.allocation.windows import reach
from isthmus.planners.observer import looked_at

SWAPS = 64
"""Pairs tried at once; the best of them is taken or left."""
MOST_STEPS = 250_000
"""Rounds x devices of one search."""
HEAT = 0.3
"""Share of one device's part of the work that a step may lose at first."""


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
