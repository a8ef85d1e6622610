"""The clients that each executor trains in a phase: its own where each has one, else a schedule by fitted times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.planners.cohort import CohortSchedule
from isthmus.protocol.federated_messages import NONE, ClientTask, ClientTime, LinearFit
from isthmus.protocol.federated_planning import plan_round
from isthmus.protocol.federated_rules import RoundRules
from isthmus.protocol.federated_throughput import ThroughputModel

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
        """Another one may be assigned clients."""
        self._number[executor] = len(self._number)
        self.throughput.add()

    def line(self, executor: str) -> LinearFit:
        return self.throughput.line(self._number[executor])

    def seconds(self, task: ClientTask, executor: str) -> float:
        """Return the task's on the executor."""
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
