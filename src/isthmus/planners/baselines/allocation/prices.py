"""Lower bounds by prices on layers.

Give every layer a price y_j >= 0. Below a limit T no device covers more than its dearest window, so where the devices'
dearest windows together cost less than all layers, T is out of reach: a proof that anyone can check with a few sums.
With prices equal to FLOPs this counts how much each device can do at best. The best prices for a T are the dual
solution of the linear programme that covers the layers by fractions of windows.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from isthmus.cost.network import Floats
from isthmus.planners.baselines.allocation.problem import LayerProblem
from isthmus.planners.baselines.allocation.windows import Windows, reach, windows
from isthmus.planners.highs import linear_programme
from isthmus.planners.observer import looked_at

MARGIN = 1e-9
"""A proof must hold by this share of the sum, so that rounding cannot make one."""
GAIN = 1e-7
"""Prices that raise the bound by less than this end the search."""


def pooled_bound_s(problem: LayerProblem) -> float:
    """All FLOPs on all devices at once, no layer whole and nothing received."""
    return float(problem.flops_before[-1] / (1.0 / problem.device_s_per_flop).sum()) * (1 - MARGIN)


def work_prices(problem: LayerProblem) -> Floats:
    """FLOPs; a layer without any still needs a device, and so is not for nothing."""
    return problem.layer_flops + 1e-12 * float(problem.layer_flops.max(initial=1.0))


def dearest(problem: LayerProblem, prices: Floats, limit_s: float) -> Floats:
    """[devices]: the price of each device's dearest window."""
    before = np.concatenate(([0.0], np.cumsum(prices)))
    return (before[reach(problem, limit_s)] - before[:-1]).max(axis=1)


def out_of_reach(problem: LayerProblem, prices: Floats, limit_s: float) -> bool:
    """Whether these prices prove that no allocation has a largest workload up to `limit_s`."""
    return float(dearest(problem, prices, limit_s).sum()) < float(prices.sum()) * (1 - MARGIN)


def priced_bound_s(problem: LayerProblem, prices: Floats, low_s: float, high_s: float) -> float:
    """The largest limit in low .. high that these prices prove out of reach, to a relative 1e-9; `low_s` if none."""
    while high_s > low_s * (1 + MARGIN) and low_s < (middle_s := (low_s + high_s) / 2) < high_s:
        if out_of_reach(problem, prices, middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def best_prices(problem: LayerProblem, low_s: float, high_s: float) -> tuple[Floats, float]:
    """Prices [layers] and the bound in seconds that they prove, at least `low_s`, which must be proven already.

    Newton's method on the limit: the prices that refute one limit best prove a higher one, until the covering
    programme has a solution there.
    """
    prices = work_prices(problem)
    low_s = priced_bound_s(problem, prices, low_s, high_s)
    while low_s < high_s:
        looked_at()
        limit_s = low_s * (1 + GAIN)
        better = refuting_prices(problem, windows(reach(problem, limit_s)))
        if better is None:
            break
        proven_s = priced_bound_s(problem, better, low_s, high_s)
        if proven_s <= limit_s:
            break
        prices, low_s = better, proven_s
    return prices, low_s


def refuting_prices(problem: LayerProblem, chosen: Windows) -> Floats | None:
    """Prices that refute a cover of the layers by fractions of these windows; None where there is such a cover.

    The programme is written in sums of prices P_0 .. P_L and the devices' dearest window D: maximise P_L - sum D with
    P_end - P_start <= D for every window. Three entries a row, however long the windows are.
    """
    layers, count = problem.layers, len(chosen.start)
    rows, steps = np.arange(count), np.arange(layers)
    # Sums of prices must not fall: P_j - P_j+1 <= 0.
    row = np.concatenate((rows, rows, rows, count + steps, count + steps))
    column = np.concatenate((chosen.end, chosen.start, layers + 1 + chosen.device, steps, steps + 1))
    value = np.concatenate((np.repeat([1.0, -1.0, -1.0], count), np.repeat([1.0, -1.0], layers)))
    shape = (count + layers, layers + 1 + problem.devices)
    cost = np.concatenate((np.zeros(layers), [-1.0], np.ones(problem.devices)))
    upper = np.full(shape[1], np.inf)
    upper[[0, layers]] = 0.0, 1.0
    found = linear_programme(
        cost, above=csr_matrix((value, (row, column)), shape=shape), bounds=np.column_stack((np.zeros(shape[1]), upper))
    )
    if found.x is None or found.fun > -MARGIN:
        return None
    return np.maximum(np.diff(found.x[: layers + 1]), 0.0)
