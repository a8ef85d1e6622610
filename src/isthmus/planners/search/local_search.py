"""Plain steps that several searches take: tours, descent by first improvement, and who gets how many micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from isthmus.cost.network import Floats
from isthmus.planners.observer import looked_at

State = TypeVar("State")
TOLERANCE = 1e-9  # relative; below it two step times are the same


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


def share_out(
    times: Sequence[tuple[float, float]], micro_batches: int, most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Micro-batches per replica, one at least and `most` of each at most, so that the last replica ends as early as
    possible.

    `times` are (fill, period) per replica. The next micro-batch always goes to the replica that would end first with
    it, which is optimal because a replica's end only rises with its share; all that end before a time at which not all
    are done yet are handed out at once. AssertionError for too few or too many.
    """
    assert micro_batches >= len(times), "every replica needs a micro-batch"
    limits = np.full(len(times), micro_batches) if most is None else np.asarray(most)
    assert limits.min() >= 1 and limits.sum() >= micro_batches, "the replicas have room for all"
    fills = np.array([fill for fill, _ in times], dtype=np.float64)
    periods = np.maximum([period for _, period in times], 1e-300)
    # When all would be done if micro-batches could be split, by the replicas that fill first: the least over how many
    # these are. Nobody ends earlier, and rounding down leaves few over.
    first = np.argsort(fills)
    rate, filled = np.cumsum(1.0 / periods[first]), np.cumsum(fills[first] / periods[first])
    time_s = float(((micro_batches - len(times) + filled) / rate).min())
    done = 1 + np.clip((time_s - fills) / periods, 0, micro_batches).astype(np.int64)
    done = np.minimum(done, limits)
    shares = done if done.sum() <= micro_batches else np.ones(len(times), dtype=np.int64)
    while shares.sum() < micro_batches:
        shares[int(np.where(shares < limits, fills + shares * periods, np.inf).argmin())] += 1
    return tuple(int(share) for share in shares)
