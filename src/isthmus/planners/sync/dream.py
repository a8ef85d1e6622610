"""Ours for DreamDDP's problem: the best schedule in intervals, and schedules that need not be intervals.

    best[h, end] = min over start of best[h - 1, start] + exposed[end, start]

What an iteration costs depends on the two ends of its interval only, so this is exact in O(H L^2), where the paper
prunes a depth-first search of O(2^min(L-H, H)) leaves (Algorithm 2) and may miss the best plan. Most of the time many
schedules hide everything: the programme compares costs, then how evenly the iterations are loaded.

An interval of early layers finds the channel idle until its first layer is ready. With some late layers in every
iteration the channel starts early in each, which hides more. To find the best such schedule is bin packing, so this is
a search, judged by a bound on all: layers go one by one, the first of the model first, where they stay hidden, and then
single moves and seeded kicks follow as long as they help.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.planners.sync.build_sync_plan import exposed_bound_s, intervals, sync_plan
from isthmus.planners.sync.problem import SyncProblem
from isthmus.planners.sync.timeline import ROUNDING, Floats, Timeline, interval_exposed_s, timeline
from isthmus.plans.sync import SyncPlan

KICKS = 100  # kicks in vain before the search ends. A number, not a time: a problem always gives the same plan.

Places = NDArray[np.intp]  # shape (layers,): the iteration of each layer, in backward order


def dream(problem: SyncProblem) -> SyncPlan:
    """The least period of any schedule in intervals, exactly, under the serial channel; bubbles filled past gaps."""
    line = timeline(problem.workers, forward_overlap=problem.forward_overlap)
    ends = cheapest_ends(interval_exposed_s(line), line.elapsed_s, problem.iterations)
    return sync_plan(problem, "dream", intervals(ends), past_gaps=True)


def cheapest_ends(exposed_s: Floats, elapsed_s: Floats, iterations: int) -> tuple[int, ...]:
    """Where each iteration's interval ends in the cheapest schedule; `exposed_s[end, start]` and `elapsed_s` as in
    `timeline`.

    Among equally cheap schedules that with the least sum of squares of what iterations average: the evenest leaves most
    room for a link that is slower than it was. (Property 1 of the paper puts layers into the earliest iterations that
    hide them, full to the brim.) Intervals may be empty; what is still equal goes into the earliest iterations.
    """
    count = len(exposed_s) - 1
    # Starts from high to low, so that the first of equal ones leaves the least to the later iteration.
    falling = np.ascontiguousarray(exposed_s[:, ::-1])
    squares = np.square(elapsed_s[:, None] - elapsed_s[::-1])
    best, evenness, steps = exposed_s[:, 0], squares[:, -1], np.arange(count + 1)
    chosen: list[NDArray[np.intp]] = []
    for _ in range(iterations - 1):
        total, uneven = falling + best[::-1], squares + evenness[::-1]
        tied = total <= total.min(axis=1, keepdims=True) * (1 + ROUNDING)
        first = np.where(tied, uneven, np.inf).argmin(axis=1)
        best, evenness = total[steps, first], uneven[steps, first]
        chosen.append(count - first)
    ends = [count]
    for starts in reversed(chosen):
        ends.append(int(starts[ends[-1]]))
    return tuple(reversed(ends))


def dream_spread(problem: SyncProblem) -> SyncPlan:
    """A schedule whose sets need not be intervals, never worse than the best that are; bubbles filled past gaps."""
    line = timeline(problem.workers, forward_overlap=problem.forward_overlap)
    places = improved(line, problem.iterations)
    sets = [np.flatnonzero(places == h).tolist() for h in range(problem.iterations)]
    return sync_plan(problem, "dream-spread", sets, past_gaps=True)


def improved(line: Timeline, iterations: int) -> Places:
    """The best places found from three starts: the exact intervals, and two greedy ones."""
    ends = cheapest_ends(interval_exposed_s(line), line.elapsed_s, iterations)
    starts: list[Places] = [np.searchsorted(ends, np.arange(line.count), side="right")]
    starts += [greedy_places(line, iterations, fullest=fullest) for fullest in (False, True)]
    board = min((_descended(line, iterations, places) for places in starts), key=IterationCosts.through_s)
    least_s = iterations * line.compute_s + exposed_bound_s(line, iterations)
    random = np.random.default_rng(0)
    vain = 0
    while vain < KICKS and board.through_s() > least_s * (1 + ROUNDING):
        places = board.places.copy()
        kicked = random.choice(line.count, size=min(line.count, int(random.integers(2, 6))), replace=False)
        places[kicked] = random.integers(iterations, size=len(kicked))
        other = _descended(line, iterations, places)
        better = other.through_s() < board.through_s() * (1 - ROUNDING)
        vain = 0 if better else vain + 1
        board = other if other.through_s() <= board.through_s() else board
    return board.places


def greedy_places(line: Timeline, iterations: int, *, fullest: bool) -> Places:
    """Layers from the last ready to the first, each where it adds the least exposed time.

    Seen from the end, an iteration that holds averages of `load` seconds is through at ready + average + load with one
    more layer in front, and then still has the tail of its last layer. Among equals the fullest iteration is taken, or
    the emptiest.
    """
    places = np.zeros(line.count, dtype=np.intp)
    load, exposed, tail = np.zeros(iterations), np.zeros(iterations), np.full(iterations, -1.0)
    for layer in reversed(range(line.count)):
        average_s = float(line.average_s[layer])
        if average_s == 0:
            continue
        tails = np.where(tail < 0, line.tail_s[layer], tail)
        after = np.maximum(exposed, line.ready_s[layer] + average_s + load + tails - line.compute_s)
        ties = np.flatnonzero(after - exposed <= (after - exposed).min() + ROUNDING * line.compute_s)
        chosen = ties[load[ties].argmax() if fullest else load[ties].argmin()]
        places[layer] = chosen
        load[chosen] += average_s
        exposed[chosen], tail[chosen] = after[chosen], tails[chosen]
    return places


def _descended(line: Timeline, iterations: int, places: Places) -> IterationCosts:
    board = IterationCosts(line, iterations, places)
    while board.move():
        pass
    return board


class IterationCosts:
    """The cost of each iteration, and its cost with one layer more or one less."""

    def __init__(self, line: Timeline, iterations: int, places: Places) -> None:
        self.line = line
        self.places = places.copy()
        self.cost = np.zeros(iterations)
        self.more = np.zeros((iterations, line.count))
        self.less = np.zeros(line.count)
        for iteration in range(iterations):
            self._update(iteration)

    def through_s(self) -> float:
        return float(self.cost.sum())

    def move(self) -> bool:
        """Makes the single move that helps most. False if none does."""
        layers = np.arange(self.line.count)
        change = self.more - self.cost[:, None] + (self.less - self.cost[self.places])
        change[self.places, layers] = 0.0
        to, layer = np.unravel_index(int(change.argmin()), change.shape)
        if change[to, layer] >= -ROUNDING * self.line.compute_s:
            return False
        before = int(self.places[layer])
        self.places[layer] = to
        self._update(before)
        self._update(int(to))
        return True

    def _update(self, iteration: int) -> None:
        line, here = self.line, self.places == iteration
        inside = here & (line.average_s > 0)
        average = np.where(inside, line.average_s, 0.0)
        behind = np.cumsum(average[::-1])[::-1]
        through = np.where(inside, line.ready_s + behind, 0.0)
        until = np.maximum.accumulate(through)
        tails = np.sort(line.tail_s[inside])
        tail_s = float(tails[-1]) if len(tails) else 0.0
        cost = max(line.compute_s, float(until[-1]) + tail_s)
        # One more layer delays those in front of it, and is itself followed by those behind.
        alone = line.ready_s + behind + line.average_s
        more = np.maximum(np.maximum(until[-1], until + line.average_s), alone) + np.maximum(line.tail_s, tail_s)
        self.more[iteration] = np.where(line.average_s > 0, np.maximum(line.compute_s, more), cost)
        past = np.concatenate((np.maximum.accumulate(through[::-1])[::-1][1:], [0.0]))
        in_front = np.concatenate(([0.0], until[:-1])) - line.average_s
        less = np.maximum(past, in_front) + tail_s
        if len(tails):
            last = int(np.flatnonzero(inside)[-1])
            less[last] += (float(tails[-2]) if len(tails) > 1 else 0.0) - tail_s
        self.less[here] = np.where(inside, np.maximum(line.compute_s, less), cost)[here]
        self.cost[iteration] = cost
