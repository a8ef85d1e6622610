"""The descent of `search.descent` by the steady step (`cost.steady`), which is what the simulator takes.

    step = max over replicas r of steady step(r, m_r) + averaging

Of the neighbours of one kind those are timed of which no bound (`least_step_s`) says that they are no better, the
lowest first. A replica keeps its share of the micro-batches until it helps to give some to another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost import PlanLayout, Problem
from isthmus.cost.blocks import Blocks
from isthmus.cost.compression import packs_alike
from isthmus.cost.kernel import Bools, Floats, Ints
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Trials, held_at_most, stage_tasks, timed
from isthmus.cost.steady import least_step_s, steady_step_s
from isthmus.planners.search.descent import Change, Descent, Found, Replicas, Stages, throttling
from isthmus.planners.search.local_search import TOLERANCE

NEVER = float("inf")
EACH, TASKS = 20, 10  # Work of a kind of neighbours, for each replica; tasks of one stage that are one more.


class _Steps(NamedTuple):
    """Seconds of pipelines, infinite where they do not fit or a bound says enough; and which stages recompute."""

    seconds: Floats
    again: Bools


class SteadyDescent(Descent):
    """One problem by time, whose stages have a device each."""

    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, most: int) -> None:
        """`most` bounds the work, of which a second has about 20,000, the same on every machine."""
        super().__init__(problem, network, blocks, most)
        self._known: dict[tuple[Stages, int], _Steps] = {}

    def step_s(self, layouts: Sequence[PlanLayout]) -> float:
        """Infinite where they do not fit."""
        replicas, shares = self._replicas(layouts), [layout.micro_batches for layout in layouts]
        return max(map(self._alone_s, replicas, shares)) + float(self._sums_s(replicas, {0: replicas[:1]})[0])

    def _layout(self, stages: Stages, share: int) -> PlanLayout:
        again = self._alone(stages, share).again[0].tolist()
        return super()._layout(stages, share)._replace(recompute=tuple(again))

    def _descended(self, now: Found) -> Found:
        while True:
            now = super()._descended(now)
            last = int(np.argmax(list(map(self._alone_s, now.replicas, now.shares))))
            shared = next(self._shared_otherwise(now, last, now.value * (1 - TOLERANCE)), None)
            if shared is None:
                return now
            now = shared

    def near(self, layouts: Sequence[PlanLayout], below_s: float) -> Iterator[list[PlanLayout]]:
        """Yield the best of each kind of neighbours, and of the ways in which each replica gives micro-batches to
        others, as far as these take less than so many seconds."""
        now = Found(self._replicas(layouts), tuple(x.micro_batches for x in layouts), self.step_s(layouts))
        shared = (self._shared_otherwise(now, r, below_s) for r in range(len(now.shares)))
        given = (min(ways, key=lambda found: found.value, default=None) for ways in shared)
        moved = (self._best(now, change, below_s) for change in self._changes(now.replicas))
        for found in itertools.chain(given, moved):
            if found is not None:
                yield list(map(self._layout, found.replicas, found.shares))

    def _shared_otherwise(self, now: Found, giver: int, below_s: float) -> Iterator[Found]:
        """Yield ways to share the batch that take less: this replica gives micro-batches to another one."""
        steps_s = list(map(self._alone_s, now.replicas, now.shares))
        rest_s = now.value - max(steps_s)
        for other in (r for r in np.argsort(steps_s).tolist() if r != giver):
            for count in (2**k for k in range(now.shares[giver].bit_length())):
                shares = list(now.shares)
                shares[giver], shares[other] = shares[giver] - count, shares[other] + count
                if self.left <= 0 or shares[giver] < 1:
                    break
                value = max(map(self._alone_s, now.replicas, shares)) + rest_s
                if value < below_s:
                    yield Found(now.replicas, tuple(shares), value)

    def _best(self, now: Found, change: Change, goal: float) -> Found | None:
        count = len(next(iter(change.values())))
        self.left -= EACH * len(now.shares) + count // 4
        value, sums_s = np.zeros(count), self._sums_s(now.replicas, change)
        for r, share in enumerate(now.shares):
            if r in change:
                below_s = goal - sums_s
                value = np.maximum(value, self._timed_steps(change[r], share, below_s).seconds)
            else:
                value = np.maximum(value, self._alone_s(now.replicas[r], share))
        value = value + sums_s
        k = int(value.argmin())
        if value[k] >= goal:
            return None
        replicas = tuple(change[r][k] if r in change else stages for r, stages in enumerate(now.replicas))
        return Found(replicas, now.shares, float(value[k]))

    def _sums_s(self, replicas: Replicas, change: Change) -> Floats:
        """[neighbours]: averaging."""
        count = len(next(iter(change.values())))
        if len(replicas) == 1:
            return np.zeros(count)
        owners = [self._owners(change.get(r, (stages,))) for r, stages in enumerate(replicas)]
        holders = np.stack([np.broadcast_to(found, (count, found.shape[1])) for found in owners], axis=1)
        return self._averaging.nearly_s(holders) / self.problem.sync.every

    def _owners(self, several: Sequence[Stages]) -> Ints:
        trials = self._trials(several)
        return self._averaging.owners(trials.order, trials.table.ends[trials.cuts])

    def _alone_s(self, stages: Stages, share: int) -> float:
        return float(self._alone(stages, share).seconds[0])

    def _alone(self, stages: Stages, share: int) -> _Steps:
        if (stages, share) not in self._known:
            self._known[stages, share] = self._timed_steps([stages], share, np.array([NEVER]))
        return self._known[stages, share]

    def _timed_steps(self, several: Sequence[Stages], share: int, below_s: Floats) -> _Steps:
        """The soonest of likely choices of stages that recompute. Only what may be below its limit is timed."""
        trials = self._trials(several)
        found = _Steps(np.full(len(several), NEVER), np.zeros(trials.order.shape, dtype=bool))
        for again, rows in self._choices(trials):
            if not len(rows):
                continue
            tasks = stage_tasks(self.problem, self.network, trials, share, again)
            rows, limit_s = rows[(tasks.held[rows] >= 1).all(axis=1)], np.minimum(below_s, found.seconds)
            over_s = least_step_s(tasks[rows], share) - limit_s[rows]  # over its limit; the best is below it by most
            best_s = 0.0
            for k in np.argsort(over_s, kind="stable").tolist():
                if over_s[k] >= best_s:
                    break
                row = int(rows[k])
                step_s = steady_step_s(tasks, row, share)
                self.left -= 1 + share * trials.order.shape[1] // TASKS
                if step_s < limit_s[row]:
                    found.seconds[row], found.again[row] = step_s, again[row]
                    best_s = min(best_s, step_s - float(limit_s[row]))
        return found

    def _choices(self, trials: Trials) -> Iterator[tuple[Bools, Ints]]:
        """Yield which stages recompute, and the pipelines in which any does: none, those that memory throttles, those
        that hold fewer than all micro-batches."""
        none = np.zeros(trials.order.shape, dtype=bool)
        yield none, np.arange(len(trials.order))
        short = held_at_most(self.problem, self.network, trials, none) < self.problem.micro_batches
        rows = np.flatnonzero(short.any(axis=1))
        if self.problem.recompute and len(rows):
            again = none.copy()
            again[rows] = short[rows] & throttling(timed(self.problem, self.network, trials[rows]))
            for chosen in (again, short):
                yield chosen, np.flatnonzero(chosen.any(axis=1))


def is_steady(problem: Problem) -> bool:
    """Return whether plans of the problem are minimised by the steady step: time alone counts, and each stage has a
    device of its own and a schedule that `cost.steady` knows."""
    constraints = problem.constraints
    free = constraints.objective == "time" and not constraints.limited
    apart = not constraints.labels_stay and not constraints.copied
    return free and apart and problem.schedule in ("1f1b", "gpipe") and packs_alike(problem)
