"""Who hands over to whom: the perfect matching between two groups whose slowest pair is as fast as possible (Eq. 3)."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from isthmus.cost.kernel import Floats, Ints

_TABLED = 8
"""Up to so many rows, many matchings at once are a dynamic programme over sets of columns."""
_SMALL = 32
"""Up to so many rows, building scipy's sparse matrix costs more than the matching."""


def bottlenecks_s(costs: Floats) -> Floats:
    """[matrices] the least t of `costs` [n, n, matrices].

    The first k rows meet the columns of a set of k in least(set) = min over its columns c of
    max(least(set without c), cost[k, c]).
    """
    rows = len(costs)
    if rows > _TABLED:
        return np.array([bottleneck_matching(costs[:, :, k])[0] for k in range(costs.shape[2])])
    least = np.zeros((1, costs.shape[2]), dtype=costs.dtype)
    for cost, (column, without) in zip(costs, _column_sets(rows), strict=True):
        least = np.maximum(least[without], cost[column]).min(axis=1)
    return least[0]


@cache
def _column_sets(columns: int) -> list[tuple[Ints, Ints]]:
    """For each size k: the columns of every set of k, and which set of k - 1 is left without each, [sets, k]."""
    sizes: list[tuple[Ints, Ints]] = []
    number: dict[tuple[int, ...], int] = {(): 0}
    for size in range(1, columns + 1):
        sets = list(itertools.combinations(range(columns), size))
        without = [[number[chosen[:c] + chosen[c + 1 :]] for c in range(size)] for chosen in sets]
        sizes.append((np.array(sets), np.array(without)))
        number = {chosen: k for k, chosen in enumerate(sets)}
    return sizes


def bottleneck_matching(cost: Floats) -> tuple[float, list[int]]:
    """The least t such that the pairs up to t hold a perfect matching, and for each row the column that it is matched
    with (DT-FM Eq. 3; supplement: polynomial). `cost` is [n, n], in seconds.

    Bisection over the values that occur, from the dearest cheapest pair of any row or column upward.
    """
    floor = max(float(cost.min(axis=1).max()), float(cost.min(axis=0).max()))
    found = _perfect(cost <= floor)
    if found is not None:  # the usual case: worth a try before sorting
        return floor, found
    values = np.unique(cost[cost > floor])
    least = values[bisect_left(values[:-1], True, key=lambda value: _perfect(cost <= value) is not None)]
    found = _perfect(cost <= least)
    assert found is not None, "up to the dearest pair all are allowed"
    return float(least), found


def _perfect(allowed: NDArray[np.bool_]) -> list[int] | None:
    """A perfect matching of the allowed pairs as a column per row, or None."""
    if len(allowed) > _SMALL:
        matched = maximum_bipartite_matching(csr_array(allowed), perm_type="column")
        return None if (matched < 0).any() else [int(column) for column in matched]
    rows = (allowed @ _BITS[: len(allowed)]).tolist()
    owner: dict[int, int] = {}
    for row in range(len(rows)):
        if not _augment(rows, row, owner, [0]):
            return None
    columns = [0] * len(rows)
    for bit, row in owner.items():
        columns[row] = bit.bit_length() - 1
    return columns


def _augment(rows: list[int], row: int, owner: dict[int, int], seen: list[int]) -> bool:
    """Kuhn's augmenting path from `row`. Columns are single bits; `seen` holds one mask."""
    free = rows[row] & ~seen[0]
    while free:
        bit = free & -free
        seen[0] |= bit
        if bit not in owner or _augment(rows, owner[bit], owner, seen):
            owner[bit] = row
            return True
        free = rows[row] & ~seen[0]
    return False


_BITS = 1 << np.arange(_SMALL, dtype=np.int64)
