"""Plain steps that several searches share: tours, and descent by first improvement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from isthmus.cost.network import Floats
from isthmus.planners.observer import looked_at

State = TypeVar("State")


def nearest_tour(between: Floats, start: int, among: Iterable[int]) -> list[int]:
    """From `start` always to the nearest place left of `among`; of equally near ones to the first."""
    left = np.array(sorted(set(among) - {start}), dtype=np.intp)
    tour = [start]
    while len(left):
        nearest = int(between[tour[-1], left].argmin())
        tour.append(int(left[nearest]))
        left = np.delete(left, nearest)
    return tour


def two_opt(between: Floats, tour: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The tour after reversals inside spans of it, the best first, until none shortens it (2-opt).

    `between` is symmetric; the tour is open at both ends.
    """
    distance = np.pad(between, (0, 1))  # one more place, at no distance, before the first and after the last
    line = np.array([-1, *tour, -1])
    least = 1e-9 * float(distance[line[:-1], line[1:]].sum())
    improved = True
    while improved:
        improved = False
        for first, end in spans:
            here, before, after = line[first + 1 : end + 1], line[first:end], line[first + 2 : end + 2]
            # [i, j]: what is saved where i .. j are reversed, so that j follows what was before i
            saved = distance[before, here][:, None] + distance[here, after][None, :]
            saved = np.triu(saved - distance[np.ix_(before, here)] - distance[np.ix_(here, after)], 1)
            i, j = np.unravel_index(saved.argmax(), saved.shape)
            if saved[i, j] > least:
                here[i : j + 1] = here[i : j + 1][::-1].copy()
                improved = True
    return [int(place) for place in line[1:-1]]


def first_improvement(
    start: State,
    neighbours: Callable[[State], Iterator[State]],
    seconds: Callable[[State], float],
    *,
    most: int,
    tolerance: float,
) -> State:
    """Go to the first neighbour that takes less by more than a relative `tolerance`, until none does or `most` were
    looked at. Neighbours are made one by one: what is behind the one taken costs nothing."""
    now, improved = start, True
    while improved:
        improved = False
        for other in neighbours(now):
            most -= 1
            if most < 0:
                return now
            looked_at()
            if seconds(other) < seconds(now) * (1 - tolerance):
                now, improved = other, True
                break
    return now
