"""How fast the executors train: what was measured becomes a line per executor, and a round's schedule.

In the first rounds nothing is known, or too little of some: sizes alone then say how long a client takes there, at the
pace of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from isthmus.planners.cohort import (
    CohortProblem,
    CohortSchedule,
    TimeHistory,
    TimeModel,
    certified,
    equal_times,
    fit_times,
    fractional,
    parrot,
    schedule_cohort,
)
from isthmus.planners.cohort.problem import Floats
from isthmus.protocol.federated_messages import ClientTime, LinearFit

STEP_S = 1e-4
"""What one exchange of the certified search takes, roughly."""
FEWEST_STEPS, MOST_STEPS = 300, 4000
LARGE = 100_000_000
"""Clients x executors from where on the certified search's tables would be larger than 1 GB; then it is Parrot's."""
TINY_S = 1e-12
FEWEST = 3
"""Clients that an executor must have trained before its own line is believed."""


class ThroughputModel:
    """The history of a run's client times, by executor number, and what it predicts."""

    def __init__(self, executors: int, *, window_rounds: int) -> None:
        """`window_rounds` is the regression's window; 0: all rounds count."""
        self.executors = executors
        self._window = window_rounds
        self._records: list[deque[tuple[int, Floats, Floats]]] = [deque() for _ in range(executors)]
        self._lines: TimeModel | None = None

    @property
    def known(self) -> bool:
        """Whether any executor's line is believed."""
        return any(self._believed(e) for e in range(self.executors))

    def _believed(self, executor: int) -> bool:
        return sum(len(sizes) for _, sizes, _ in self._records[executor]) >= FEWEST

    def record(self, round_: int, executor: int, timed: Sequence[ClientTime]) -> None:
        """What an executor trained in a round."""
        if not timed:
            return
        sizes = np.array([t.samples for t in timed], dtype=np.float64)
        seconds = np.array([t.seconds for t in timed], dtype=np.float64)
        records = self._records[executor]
        records.append((round_, sizes, seconds))
        # The last that is known of an executor stays, however old: it is better than nothing.
        while self._window and len(records) > 1 and records[0][0] <= round_ - self._window:
            records.popleft()
        self._lines = None

    def lines(self) -> TimeModel:
        """(executors,) the lines; one second per sample while nothing is known."""
        if self._lines is None:
            self._lines = self._fit() if self.known else equal_times(self.executors)
        return self._lines

    def line(self, executor: int) -> LinearFit:
        lines = self.lines()
        return LinearFit(float(lines.seconds_per_sample[executor]), float(lines.fixed_s[executor]))

    def _fit(self) -> TimeModel:
        believed = np.array([e for e in range(self.executors) if self._believed(e)])
        kept = [(place, *record) for place, e in enumerate(believed) for record in self._records[e]]
        lengths = [len(sizes) for _, _, sizes, _ in kept]
        fitted = fit_times(
            TimeHistory(
                rounds=np.repeat([r[1] for r in kept], lengths),
                executors=np.repeat([r[0] for r in kept], lengths),
                sizes=np.concatenate([r[2] for r in kept]),
                seconds=np.concatenate([r[3] for r in kept]),
            ),
            len(believed),
            window_rounds=self._window or None,
        )
        per_sample = np.full(self.executors, float(fitted.seconds_per_sample.mean()))
        fixed_s = np.full(self.executors, float(fitted.fixed_s.mean()))
        per_sample[believed], fixed_s[believed] = fitted.seconds_per_sample, fitted.fixed_s
        # A clock's resolution can make an executor look infinitely fast, which no schedule accepts.
        return TimeModel(seconds_per_sample=np.where(per_sample + fixed_s > 0, per_sample, 1e-9), fixed_s=fixed_s)

    def schedule(self, planner: str, sizes: Floats, among: Iterable[int]) -> CohortSchedule:
        """A round's schedule over the executors `among`, in their order. `sizes` (clients,) in samples.

        `certified` looks no longer than a better schedule could save: short rounds are Parrot's.
        """
        chosen = np.array(list(among), dtype=np.int64)
        lines = self.lines()
        if len(chosen) == 1:
            return _everything(planner, sizes, self.line(int(chosen[0])))
        problem = CohortProblem(
            sizes=sizes, seconds_per_sample=lines.seconds_per_sample[chosen], fixed_s=lines.fixed_s[chosen]
        )
        if planner != "certified":
            return schedule_cohort(planner, problem)
        greedy = parrot(problem)
        if not self.known or problem.clients * problem.executors > LARGE:
            return greedy
        per_sample = np.maximum(problem.seconds_per_sample, TINY_S)
        at_least_s = float(sizes.sum() / (1 / per_sample).sum())
        if greedy.makespan_s - at_least_s < FEWEST_STEPS * STEP_S:
            return greedy
        # What clients take whatever their size is left out there: it would pass for something to be saved.
        bound_s = min(fractional(problem).lower_bound_s, greedy.makespan_s)
        steps = int((greedy.makespan_s - bound_s) / STEP_S)
        if steps < FEWEST_STEPS:
            return replace(greedy, lower_bound_s=bound_s)
        return certified(problem, steps=min(steps, MOST_STEPS))


def _everything(planner: str, sizes: Floats, line: LinearFit) -> CohortSchedule:
    """There is one executor: it trains them all, by every planner."""
    load_s = line.seconds_per_sample * float(sizes.sum()) + line.fixed_s * len(sizes)
    nobody_else = np.zeros(len(sizes), dtype=np.int64)
    return CohortSchedule(algorithm=planner, executor_of=nobody_else, load_s=np.array([load_s]), lower_bound_s=load_s)
