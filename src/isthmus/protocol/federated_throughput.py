"""How fast the executors train: what was measured becomes a line per executor.

In the first rounds nothing is known, or too little of some: sizes alone then say how long a client takes there, at the
pace of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from isthmus.planners.cohort import TimeHistory, TimeModel, equal_times, fit_times
from isthmus.planners.cohort.problem import Floats
from isthmus.protocol.federated_messages import ClientTime, LinearFit
from isthmus.protocol.federated_planning import PlanningProblem

FEWEST = 3  # clients that an executor must have trained before its own line is believed


class ThroughputModel:
    """The history of a run's client times, by executor number, and what it predicts."""

    def __init__(self, executors: int, *, window_rounds: int) -> None:
        """`window_rounds` is the regression's window; 0: all rounds count."""
        self.executors = executors
        self._window = window_rounds
        self._records: list[deque[tuple[int, Floats, Floats]]] = [deque() for _ in range(executors)]
        self._lines: TimeModel | None = None

    def add(self) -> None:
        """There is one executor more."""
        self.executors += 1
        self._records.append(deque())
        self._lines = None

    @property
    def known(self) -> bool:
        """Return whether any executor's line is believed."""
        return any(self._believed(e) for e in range(self.executors))

    def _believed(self, executor: int) -> bool:
        return sum(len(sizes) for _, sizes, _ in self._records[executor]) >= FEWEST

    def record(self, round_: int, executor: int, timed: Sequence[ClientTime]) -> None:
        """Add the clients that an executor trained in a round, with their times."""
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

    def problem(self, planner: str, sizes: Floats, among: Iterable[int]) -> PlanningProblem:
        """A round's, over the executors `among`, in their order. `sizes` (clients,) in samples."""
        chosen, lines = np.array(list(among), dtype=np.int64), self.lines()
        return PlanningProblem(
            planner=planner,
            sizes=sizes,
            seconds_per_sample=lines.seconds_per_sample[chosen],
            fixed_s=lines.fixed_s[chosen],
            known=self.known,
        )
