"""The clients that each executor trains in a phase: its own where each has one, else a schedule by fitted times.

How fast the executors train: what was measured becomes a line per executor.

In the first rounds nothing is known, or too little of some: sizes alone then say how long a client takes there, at the
pace of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.planners.cohort import CohortSchedule, TimeHistory, TimeModel, equal_times, fit_times
from isthmus.planners.cohort.problem import Floats
from isthmus.protocol.federated_messages import NONE, ClientTask, ClientTime, LinearFit
from isthmus.protocol.federated_planning import PlanningProblem, RoundRules, plan_round

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
        self.executors += 1
        self._records.append(deque())
        self._lines = None

    @property
    def known(self) -> bool:
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


Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClientAssignment:
    """Every executor's tasks, the largest first: what may be stolen at the end is small."""

    tasks: Mapping[str, tuple[ClientTask, ...]]
    schedule: CohortSchedule | None = None
    """Its times are seconds; None where no pace was known when it was made, or nothing was to be scheduled."""


@dataclass(frozen=True, eq=False)
class _Plan:
    round: int
    alive: tuple[str, ...]
    cohort: Integers
    timed: bool  # whether a pace was known
    schedule: CohortSchedule


class ClientScheduler:
    """Assigns the clients of a round to executors, by the known times of both. It also records which state is each
    client's."""

    def __init__(
        self,
        executors: Sequence[str],
        rules: RoundRules,
        sizes: Integers,
        throughput: ThroughputModel,
        states: NDArray[np.int32] | None,
        pinned: Mapping[str, int],
    ) -> None:
        """`sizes` (population,) in samples, 0 for a client that has not said yet; `states` (population,)."""
        self.sizes = sizes
        self.states = states
        self.throughput = throughput
        self.pinned = pinned  # the client of each executor that has the data of one only
        self.late: Mapping[int, int] = {}
        """Rounds that clients of the assigned cohort are late; a client that is not late may be absent."""
        self._rules = rules
        self._number = {name: number for number, name in enumerate(executors)}
        self._plan: _Plan | None = None

    def number(self, executor: str) -> int:
        return self._number[executor]

    def add(self, executor: str) -> None:
        self._number[executor] = len(self._number)
        self.throughput.add()

    def line(self, executor: str) -> LinearFit:
        return self.throughput.line(self._number[executor])

    def seconds(self, task: ClientTask, executor: str) -> float:
        return self.line(executor).seconds(task.samples)

    def samples(self, cohort: Integers) -> int:
        """Return the samples of all these clients, or an upper bound."""
        return len(cohort) * self._rules.most_samples or int(self.sizes[cohort].sum())

    def keep(self, timed: Sequence[ClientTime]) -> None:
        """These are the clients' states from now on."""
        if self.states is not None:
            kept = [timed_client for timed_client in timed if timed_client.state != NONE]
            clients = [timed_client.client for timed_client in kept]
            self.states[clients] = [timed_client.state for timed_client in kept]

    def assignment(self, round_: int, cohort: Integers, alive: Sequence[str]) -> ClientAssignment:
        """Return the assignment of a pass. A second one may have fewer clients, and executors may have been lost since
        the round was planned: then it is planned again."""
        if self.pinned:
            chosen = set(cohort.tolist())
            mine = {name: self.pinned[name] for name in alive if self.pinned.get(name) in chosen}
            return ClientAssignment({name: self._tasks(np.array([client])) for name, client in mine.items()})
        plan = self._plan
        same = plan is not None and (plan.round, plan.alive) == (round_, tuple(alive))
        if plan is None or not (same and np.array_equal(plan.cohort, cohort)):
            plan = self.plan(round_, cohort, alive)
        schedule, sizes = plan.schedule, self.sizes[cohort]
        dealt: dict[str, tuple[ClientTask, ...]] = {}
        for name, places in zip(alive, schedule.clients_of(), strict=True):
            order = places[np.argsort(-sizes[places], kind="stable")]
            dealt[name] = self._tasks(cohort[order])
        return ClientAssignment(dealt, schedule if plan.timed else None)

    def plan(self, round_: int, cohort: Integers, alive: Sequence[str]) -> _Plan:
        """Schedule a round. A short round's schedule is made sooner than another thread wakes up."""
        early = round_ - self._rules.first_round < self._rules.warm_up_rounds
        planner = "uniform" if early else self._rules.planner
        sizes = self.sizes[cohort].astype(np.float64)
        numbers = [self._number[name] for name in alive]
        problem = self.throughput.problem(planner, sizes, numbers)
        self._plan = _Plan(round_, tuple(alive), cohort, problem.known, plan_round(problem))
        return self._plan

    def cohort_ahead(self, round_: int) -> Integers | None:
        """Return the cohort of a round that was planned ahead; None if it was not."""
        return self._plan.cohort if self._plan is not None and self._plan.round == round_ else None

    def _tasks(self, clients: Integers) -> tuple[ClientTask, ...]:
        """Whole columns at a time: one number out of an array takes as long as a task."""
        numbers, sizes = clients.tolist(), self.sizes[clients].tolist()
        if self.late:
            lates = [self.late.get(client, 0) for client in numbers]
            return tuple(
                ClientTask(*timed_client, late=late) for *timed_client, late in zip(numbers, sizes, lates, strict=True)
            )
        if self.states is None:
            return tuple(map(ClientTask, numbers, sizes))
        return tuple(map(ClientTask, numbers, sizes, self.states[clients].tolist()))
