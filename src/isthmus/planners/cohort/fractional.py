"""The best schedule of clients that may be split between executors: a lower bound, and its prices.

This linear programme (minimise T; each client's shares add up to 1; no executor exceeds T) needs no solver. Where one
executor is better suited to small clients than another, t_i / b_i > t_j / b_j, an exchange of shares that keeps the
load of i lowers that of j whenever i held the larger client. So some optimum gives the smallest clients to the
executor with the largest t_k / b_k, the next ones to the next, and all executors are busy until T:

    size    5  6  8  9  9 12 15 17 30 41
            [--- 2 ---|-- 0 --|---- 1 ----]     t_2 / b_2 > t_0 / b_0 > t_1 / b_1

T is found by bisection. (Rejected: HiGHS on clients in buckets of like sizes. That needs a solver for what two sorts
and a bisection do, and its prices are less exact by what the buckets blur.)
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

import numpy as np

from isthmus.planners.cohort.problem import CohortProblem, Floats, Integers

PRECISION = 1e-8
"""Relative width at which the bisection stops. The bound is computed from the prices, so it is valid all the same."""
MOST_STEPS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Fractional:
    """An optimal solution of the programme and of its dual, up to rounding."""

    lower_bound_s: float
    """Seconds that no schedule falls below."""
    specialists: tuple[int, ...]
    """All executors: those suited to the smallest clients first."""
    prices: Floats
    """(executors,) the share of the dual's weight on each executor's seconds; they add up to 1."""
    rounded: Integers
    """(clients,) the executor that has most of each client, for clients in ascending order of size."""


def fractional(problem: CohortProblem) -> Fractional:
    """Solve the programme. O(executors log clients) per step of the bisection, O(clients executors) for the bound."""
    sizes = np.sort(problem.sizes)
    # An angle, because t / b is infinite where b is 0.
    specialists = np.argsort(-np.arctan2(problem.seconds_per_sample, problem.fixed_s), kind="stable")
    line = _Line(sizes, problem.seconds_per_sample[specialists], problem.fixed_s[specialists])
    alone_s = problem.sizes.sum() * problem.seconds_per_sample + problem.clients * problem.fixed_s
    low, high = 0.0, float(alone_s.min())
    for _ in range(MOST_STEPS):
        if high - low <= PRECISION * high:
            break
        middle = (low + high) / 2
        if line.cuts(middle) is None:
            high = middle
        else:
            low = middle
    cuts = line.cuts(low) or []
    prices = np.empty(problem.executors)
    prices[specialists] = line.prices(cuts)
    # A client belongs to the executor that has its middle.
    middles = np.arange(problem.clients) + 0.5
    share = np.minimum(np.searchsorted(np.array(cuts), middles), problem.executors - 1)
    return Fractional(
        lower_bound_s=dual_bound_s(problem, prices),
        specialists=tuple(specialists.tolist()),
        prices=prices,
        rounded=specialists[share].astype(np.int64),
    )


def dual_bound_s(problem: CohortProblem, prices: Floats) -> float:
    """The Lagrangian bound: sum over m of min over k of `prices_k T_mk`, for any prices that add up to 1.

    A schedule's loads, averaged by the prices, are at most its makespan; and that average is at least this sum.
    """
    return float((problem.client_s() * prices).min(axis=1).sum())


class _Line:
    """Clients in a row by size, filled by executors in the order given, each for the same time."""

    def __init__(self, sizes: Floats, seconds_per_sample: Floats, fixed_s: Floats) -> None:
        # Plain floats: the inner loop looks single numbers up, at which numpy is slow.
        self._sizes: list[float] = sizes.tolist()
        self._before: list[float] = np.concatenate([[0.0], np.cumsum(sizes)]).tolist()
        self._executors: list[tuple[float, float]] = list(
            zip(seconds_per_sample.tolist(), fixed_s.tolist(), strict=True)
        )

    def cuts(self, limit_s: float) -> list[float] | None:
        """Where each executor's share ends, in clients; None where they reach the end of the row within `limit_s`."""
        count, before, position, found = len(self._sizes), self._before, 0.0, list[float]()
        for t, b in self._executors:
            whole = int(position)
            samples = before[whole] + (position - whole) * self._sizes[whole]
            until_s = limit_s + t * samples + b * position

            def seconds(client: int, t: float = t, b: float = b) -> float:
                return t * before[client] + b * client

            last = bisect.bisect_right(range(count + 1), until_s, lo=whole, key=seconds) - 1
            if last >= count:
                return None
            position = last + (until_s - seconds(last)) / (t * self._sizes[last] + b)
            if position >= count:  # by rounding
                return None
            found.append(position)
        return found

    def prices(self, cuts: list[float]) -> Floats:
        """The dual: two neighbours pay the same for the client at their cut (complementary slackness)."""
        found = [0.0]  # logarithms: a product over hundreds of executors can overflow
        for (left, right), cut in zip(itertools.pairwise(self._executors), cuts, strict=False):
            size = self._sizes[int(cut)]
            found.append(found[-1] + math.log(size * left[0] + left[1]) - math.log(size * right[0] + right[1]))
        prices = np.exp(np.array(found) - max(found))
        return prices / prices.sum()
