"""Windows: for a limit on the workload, how far a device gets from each layer on; and so the best cut of one order.

A run may always be cut short on the right, so an allocation below the limit exists exactly where one maximal window per
device, at most, covers all layers: sort the windows by start and cut each where the next begins.

Prices on layers prove lower bounds. Give every layer a price y_j >= 0. Below a limit T no device covers more than its
dearest window, so where the devices' dearest windows together cost less than all layers, T is out of reach: a proof
that anyone can check with a few sums. With prices equal to FLOPs this counts how much each device can do at best. The
best prices for a T are the dual solution of the linear programme that covers the layers by fractions of windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation
from isthmus.planners.baselines.allocation.sky import reach
from isthmus.planners.highs import stdout_to_stderr
from isthmus.planners.observer import looked_at

MARGIN = 1e-9  # a proof must hold by this share of the sum, so that rounding cannot make one
MOST_ITERATIONS = 500  # of the interior-point method
GAIN = 1e-7  # prices that raise the bound by less than this end the search


class Windows(NamedTuple):
    """Maximal runs, [windows] each; those inside an earlier window of the same device are left out."""

    device: Ints
    start: Ints
    end: Ints


def windows(ends: Ints, allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None = None) -> Windows:
    """The maximal windows of a table that `reach` made, or those of them that are `allowed`."""
    useful = ends > np.arange(ends.shape[1])
    # Of windows with one end the earliest start covers the most.
    useful[:, 1:] &= ends[:, 1:] != ends[:, :-1]
    if allowed is not None:
        useful &= allowed
    device, start = np.nonzero(useful)
    return Windows(device, start, ends[device, start])


def ordered(chosen: Windows) -> list[int]:
    """Devices of a cover by start, without those whose window lies inside another."""
    found: list[int] = []
    covered = 0
    for index in np.lexsort((-chosen.end, chosen.start)).tolist():
        if chosen.end[index] > covered:
            found.append(int(chosen.device[index]))
            covered = int(chosen.end[index])
    return found


def best_cut(problem: LayerProblem, order: Sequence[int], low_s: float, high_s: float) -> Allocation | None:
    """The smallest largest workload in this order, to a relative 1e-12; None where it is above `high_s`.

    Any device may stay empty. Exact, by bisection and a table of places. `low_s` must not be above it, other than by
    rounding.
    """
    devices = np.array(order, dtype=np.int64)
    counts = cut_within(problem, devices, high_s)
    if counts is None:
        return None
    best = allocation(problem, order, counts)
    while best.workload_s > low_s * (1 + 1e-12):
        middle_s = (low_s + best.workload_s) / 2
        if not low_s < middle_s < best.workload_s:
            break
        counts = cut_within(problem, devices, middle_s)
        if counts is None:
            low_s = middle_s
        else:
            best = allocation(problem, order, counts)
    return best


def cut_within(problem: LayerProblem, order: Ints, limit_s: float) -> list[int] | None:
    """Layers of each device in this order with no workload above the limit, on few devices; None where it is too low.

    A greedy cut would do if a later start never cost more; what a device receives at a boundary can break that.
    """
    ends = reach(problem, limit_s)[order]
    reached = np.zeros((len(order) + 1, problem.layers + 1), dtype=bool)
    reached[0, 0] = True
    for number, row in enumerate(ends):
        starts = np.flatnonzero(reached[number, :-1] & (row > np.arange(problem.layers)))
        change = np.bincount(starts + 1, minlength=problem.layers + 2)
        change -= np.bincount(row[starts] + 1, minlength=problem.layers + 2)
        reached[number + 1] = reached[number] | (np.cumsum(change)[:-1] > 0)
    if not reached[-1, -1]:
        return None
    counts = [0] * len(order)
    end = problem.layers
    for number in range(len(order) - 1, -1, -1):
        if not reached[number, end]:
            starts = np.flatnonzero(reached[number, :end] & (ends[number, :end] >= end))
            counts[number] = end - _narrowest(problem, starts)
            end -= counts[number]
    return counts


def _narrowest(problem: LayerProblem, starts: Ints) -> int:
    """Where the fewest bytes are received; the longest run among equals."""
    if problem.transfers is None:
        return int(starts[0])
    return int(starts[np.argmin(problem.transfers.boundary_bytes[starts])])


def work_prices(problem: LayerProblem) -> Floats:
    """FLOPs; a layer without any still needs a device, and so is not for nothing."""
    return problem.layer_flops + 1e-12 * float(problem.layer_flops.max(initial=1.0))


def earned(prices: Floats, ends: Ints) -> Floats:
    """[devices, layers]: the price of each window of a table that `reach` made."""
    before = np.concatenate(([0.0], np.cumsum(prices)))
    return before[ends] - before[:-1]


def out_of_reach(problem: LayerProblem, prices: Floats, limit_s: float) -> bool:
    """Return whether these prices prove that no allocation has a largest workload up to `limit_s`."""
    dearest = earned(prices, reach(problem, limit_s)).max(axis=1)
    return float(dearest.sum()) < float(prices.sum()) * (1 - MARGIN)


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
    above = csr_matrix((value, (row, column)), shape=shape)
    with stdout_to_stderr():
        found = linprog(
            cost,
            A_ub=above,
            b_ub=np.zeros(shape[0]),
            bounds=np.column_stack((np.zeros(shape[1]), upper)),
            method="highs-ipm",
            options={"maxiter": MOST_ITERATIONS},
        )
    if found.x is None or found.fun > -MARGIN:
        return None
    return np.maximum(np.diff(found.x[: layers + 1]), 0.0)
