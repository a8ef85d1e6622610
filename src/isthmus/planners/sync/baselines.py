"""DreamDDP's own search (Algorithm 2), and its baselines: the same number of layers in every iteration (PLSGD-ENP), and
every schedule in intervals, compared one by one (O((H+L)! / (L! H!)))."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from isthmus.errors import UserError
from isthmus.planners.sync.build_sync_plan import intervals, sync_plan
from isthmus.planners.sync.problem import SyncProblem
from isthmus.planners.sync.timeline import Floats, Timeline, interval_exposed_s, printed_exposed_s, timeline
from isthmus.plans.sync import SyncPlan

MOST_SCHEDULES = 2_000_000  # a few seconds. 30 layers in 5 iterations are 46,376.

_AT_ONCE = 1 << 16


def dream_dfs(problem: SyncProblem) -> SyncPlan:
    """The paper's search under its own cost (Eq. 8), then timed on the serial channel; bubbles filled as it says.

    The evident intent of Algorithm 2 is built. As printed, lines 13-15 add a solution for each layer given to the
    last set though all but one are unfinished; line 28 recurses on a copy that is made only in the next line; line
    30 goes back to h-1 where Eq. 10 goes on to h+1.
    """
    line = timeline(problem.workers, forward_overlap=problem.forward_overlap)
    ends = search(line, problem.iterations).ends
    return sync_plan(problem, "dream-dfs", intervals(ends), past_gaps=False)


class FoundSchedule(NamedTuple):
    """The best way to open so many sets, and how many sets the paper's search would have compared (|Omega|)."""

    exposed_s: float
    ends: tuple[int, ...]
    leaves: int


def search(line: Timeline, iterations: int) -> FoundSchedule:
    """Algorithm 2's best solution.

    What is still to be paid depends only on the set and on the layer where it starts (Eq. 9), so branches that meet
    there are merged. The result is that of the whole tree, whose leaves double with almost every set.
    """
    exposed = printed_exposed_s(line)
    choices = set_ends(line)
    level = {0: FoundSchedule(0.0, (), 1)}
    for iteration in range(iterations):
        after: dict[int, FoundSchedule] = {}
        for start, partial in level.items():
            last = iteration == iterations - 1
            for end in (line.count,) if last else choices[start]:
                exposed_s = partial.exposed_s + float(exposed[end, start])
                best = after.get(end)
                leaves = partial.leaves + (best.leaves if best else 0)
                if best is None or exposed_s < best.exposed_s:
                    best = FoundSchedule(exposed_s, (*partial.ends, end), leaves)
                after[end] = best._replace(leaves=leaves)
        level = after
    return level[line.count]


def set_ends(line: Timeline) -> list[tuple[int, ...]]:
    """For a set that starts at layer 0, 1, ... and at the end of the model: where the search may end it.

    Its first layer always belongs to it (Property 3), and so does each next one that stays hidden (Property 1).
    The first that does not is tried both ways, unless the set overflows already: then it is delayed (Property 2).
    """
    count, elapsed = line.count, line.elapsed_s
    hidden_s = line.compute_s - line.ready_s
    hidden_ends = np.searchsorted(elapsed[1:] + line.tail_s, elapsed[:-1] + hidden_s, side="right")
    found: list[tuple[int, ...]] = []
    for start, end in enumerate(hidden_ends.tolist()):
        if end <= start:
            found.append((start + 1,))
        else:
            found.append((count,) if end == count else (end + 1, end))
    return [*found, (count,)]


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
