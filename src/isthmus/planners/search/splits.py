"""Which of many choices of pipelines ends a step first, the micro-batches being split as well as can be.

A step only gets longer with a pipeline's share, so whether some split ends by a time T is a count: T less the
averaging, and the micro-batches that each pipeline ends within that. Bisection over T leaves fewer choices each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost.cut_table import Ints
from isthmus.cost.network import Floats
from isthmus.cost.pipelines import Pipelines
from isthmus.planners.observer import looked_at
from isthmus.planners.search.threshold_search import TOLERANCE

MOST_HALVINGS = 60


class Soonest(NamedTuple):
    step_s: float
    rows: tuple[int, ...]
    """Per replica, the pipeline."""
    shares: tuple[int, ...]


def soonest(
    pipelines: Sequence[Pipelines], rows: Ints, sync_s: Floats, micro_batches: int, goal_s: float
) -> Soonest | None:
    """The choice that ends first, if before `goal_s`.

    `rows` is [choices, replicas], into each replica's pipelines; `sync_s` [choices] what averaging takes.
    """
    rows, sync_s = _in_time(pipelines, rows, sync_s, micro_batches, goal_s)
    if not len(rows):
        return None
    low, high = 0.0, goal_s
    for _ in range(MOST_HALVINGS):
        middle = (low + high) / 2
        if high - low <= TOLERANCE / 10 * high:
            break
        looked_at(0)
        left, left_sync_s = _in_time(pipelines, rows, sync_s, micro_batches, middle)
        if len(left):
            rows, sync_s, high = left, left_sync_s, middle
        else:
            low = middle
    chosen = tuple(int(row) for row in rows[0])
    return Soonest(high, chosen, _shares(pipelines, chosen, micro_batches, high - float(sync_s[0])))


def _in_time(
    pipelines: Sequence[Pipelines], rows: Ints, sync_s: Floats, micro_batches: int, time_s: float
) -> tuple[Ints, Floats]:
    """Those choices of which some split ends by then."""
    counts = [p.counts(rows[:, r], time_s - sync_s, micro_batches) for r, p in enumerate(pipelines)]
    able = (np.min(counts, axis=0) > 0) & (np.sum(counts, axis=0) >= micro_batches)
    return rows[able], sync_s[able]


def _shares(pipelines: Sequence[Pipelines], rows: Sequence[int], micro_batches: int, time_s: float) -> tuple[int, ...]:
    """A split that is in time: each replica what it manages, less what is too much."""
    shares = [
        int(p.counts(np.array([row]), np.array([time_s]), micro_batches)[0])
        for p, row in zip(pipelines, rows, strict=True)
    ]
    for r in range(len(shares)):
        shares[r] -= min(shares[r] - 1, sum(shares) - micro_batches)
    return tuple(shares)
