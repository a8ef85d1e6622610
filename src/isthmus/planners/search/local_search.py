"""Two plain steps that several searches share: a tour to the nearest neighbour, and descent by first improvement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
