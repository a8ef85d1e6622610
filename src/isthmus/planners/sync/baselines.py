"""DreamDDP's baselines: the same number of layers in every iteration (PLSGD-ENP), and every schedule in intervals,
compared one by one (O((H+L)! / (L! H!)))."""

from __future__ import annotations

import itertools
import math

import numpy as np

from isthmus.errors import UserError
from isthmus.planners.sync.build_sync_plan import intervals, sync_plan
from isthmus.planners.sync.problem import SyncProblem
from isthmus.planners.sync.timeline import Floats, interval_exposed_s, timeline
from isthmus.plans.sync import SyncPlan

MOST_SCHEDULES = 2_000_000
"""A few seconds. 30 layers in 5 iterations are 46,376."""

_AT_ONCE = 1 << 16


def dream_brute(problem: SyncProblem) -> SyncPlan:
    """The best of all schedules in intervals by trying them all, for up to about 30 layers.

    Raises UserError beyond `MOST_SCHEDULES`.
    """
    line = timeline(problem.workers, forward_overlap=problem.forward_overlap)
    schedules = math.comb(line.count + problem.iterations - 1, line.count)
    if schedules > MOST_SCHEDULES:
        raise UserError(
            f"dream-brute: got {line.count} layers in {problem.iterations} iterations, {schedules:,} schedules; "
            f"expected at most {MOST_SCHEDULES:,}. 'dream' is as exact at any size"
        )
    ends = best_of_all(interval_exposed_s(line), problem.iterations)
    return sync_plan(problem, "dream-brute", intervals(ends), past_gaps=False)


def best_of_all(exposed_s: Floats, iterations: int) -> tuple[int, ...]:
    """Where each iteration's interval ends in the first of the cheapest schedules, in lexicographic order."""
    count = len(exposed_s) - 1
    schedules = itertools.combinations_with_replacement(range(count + 1), iterations - 1)
    best_s, best = math.inf, (count,)
    while batch := list(itertools.islice(schedules, _AT_ONCE)):
        inner = np.array(batch, dtype=np.intp).reshape(len(batch), iterations - 1)
        bounds = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, count)))
        total = exposed_s[bounds[:, 1:], bounds[:, :-1]].sum(axis=1)
        first = int(total.argmin())
        if total[first] < best_s:
            best_s, best = float(total[first]), (*batch[first], count)
    return best


def equal_number(problem: SyncProblem) -> SyncPlan:
    """The same number of layers in every iteration, whatever they cost (DreamDDP, Example 1); bubbles filled."""
    ends = equal_ends(len(problem.layers), problem.iterations)
    return sync_plan(problem, "equal-number", intervals(ends), past_gaps=False)


def equal_ends(layers: int, iterations: int) -> tuple[int, ...]:
    """Where each iteration's interval ends. Numbers that do not divide leave one layer more to the first ones."""
    each, more = divmod(layers, iterations)
    return tuple(h * each + min(h, more) for h in range(1, iterations + 1))
