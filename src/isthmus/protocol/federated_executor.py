"""A federated executor: clients one after another, sums kept until they are asked for. Events in, instructions out.

    idle ──opened──► training ──queue empty, holds──► drained ──granted──► training
                        │                                └──closed──► idle, sums sent
                        └──queue empty──► idle, sums sent

After it has sent its sums it may be granted more clients of the same phase (another executor was lost): sums add up in
any order.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec

from isthmus.protocol.federated_events import (
    BeginPhase,
    ExecutorEvent,
    ExecutorInstruction,
    ForgetPhase,
    StopExecutor,
    TasksTrained,
    TrainTasks,
)
from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    ExecutorDrained,
    LinearFit,
    PhaseClosed,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    RefusedUpdate,
    SumsSent,
    TasksGranted,
    TasksRecalled,
    TasksReturned,
    UpdateRefused,
)
from isthmus.protocol.federated_transitions import EXECUTOR, ExecutorPhase
from isthmus.protocol.machine import Machine
from isthmus.protocol.run_messages import Halt

AHEAD = 16
"""How many tasks are announced in advance. Reading this many states at once takes as long as reading a few."""


class ExecutorStatistics(msgspec.Struct, frozen=True):
    phase: ExecutorPhase
    waiting: int
    trained: int
    """Since it was made."""
    stale: int


class ExecutorMachine(Machine[ExecutorPhase, ExecutorEvent, ExecutorInstruction]):
    """The machine. `clients_per_vmap` clients of equal numbers of samples are trained as one where the driver can do
    that."""

    transitions = EXECUTOR

    def __init__(self, clients_per_vmap: int = 1) -> None:
        super().__init__()
        self._clients_per_vmap = clients_per_vmap
        self._phase_id: PhaseId | None = None
        self._queue: deque[ClientTask] = deque()
        self._busy = self._holds = self._reported = False
        self._dropped: set[PhaseId] = set()
        """Phases that ended while a client of theirs was trained."""
        self._timed: list[ClientTime] = []
        self._refused: list[RefusedUpdate] = []
        self._trained = 0

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(self._phase, len(self._queue), self._trained, self._stale)

    def works_for(self, phase: PhaseId) -> bool:
        """Whether results for this phase still count."""
        return phase == self._phase_id

    @property
    def upcoming(self) -> tuple[ClientTask, ...]:
        """The tasks after those in work, the next first: their states may be read ahead."""
        return tuple(islice(self._queue, AHEAD))

    def _is_stale(self, event: ExecutorEvent) -> bool:
        return not isinstance(event, Halt | PhaseOpened) and event.phase != self._phase_id

    def _answer_stale(self, event: ExecutorEvent) -> list[ExecutorInstruction]:
        if isinstance(event, TasksTrained) and event.phase in self._dropped:
            self._dropped.remove(event.phase)
            return [ExecutorDrained(phase=event.phase)]  # before this, no other phase waits for this executor
        return [TasksReturned(phase=event.phase, tasks=())] if isinstance(event, TasksRecalled) else []

    def _take(self, event: ExecutorEvent) -> list[ExecutorInstruction]:
        match event:
            case Halt():
                self._phase = "stopped"
                return [StopExecutor()]
            case PhaseOpened(opening=opening, tasks=tasks, holds=holds):
                return self._open(opening, tasks, holds)
            case TasksGranted(tasks=tasks, holds=holds):
                self._queue.extend(tasks)
                self._holds = holds
                return self._next()
            case TasksRecalled(own=own, thief=thief):
                return [TasksReturned(phase=event.phase, tasks=self._give(own, thief))]
            case PhaseClosed():
                self._holds = False
                return self._next()
            case UpdateRefused():
                return []
            case PhaseDropped(phase=phase, kept=kept):
                if self._busy:
                    self._dropped.add(phase)
                self._phase_id = None
                self._clear()
                return [ForgetPhase(phase, kept)]
            case TasksTrained():
                self._busy = False
                self._trained += len(event.timed)
                self._timed += event.timed
                self._refused += event.refused
                return self._next()

    def _open(self, opening: PhaseSetup, tasks: tuple[ClientTask, ...], holds: bool) -> list[ExecutorInstruction]:
        self._clear()
        self._phase_id, self._holds = opening.phase, holds
        # What still trains belongs to the phase before: its `TasksTrained` is stale, and must not hold this one up.
        self._busy = False
        self._queue.extend(tasks)
        return [BeginPhase(opening), *self._next()]

    def _clear(self) -> None:
        self._queue.clear()
        self._timed, self._refused = [], []
        self._reported = False
        self._phase = "idle"

    def _next(self) -> list[ExecutorInstruction]:
        assert self._phase_id is not None
        if self._busy:
            return []
        if self._queue:
            self._busy, self._reported, self._phase = True, False, "training"
            return [TrainTasks(self._phase_id, self._next_tasks())]
        if self._holds:
            if self._reported:
                return []
            self._reported, self._phase = True, "drained"
            return [ExecutorDrained(phase=self._phase_id)]
        sums = SumsSent(phase=self._phase_id, timed=tuple(self._timed), refused=tuple(self._refused))
        self._clear()
        return [sums]

    def _next_tasks(self) -> tuple[ClientTask, ...]:
        tasks = [self._queue.popleft()]
        alike = tasks[0].samples, tasks[0].late
        while (
            self._queue
            and len(tasks) < self._clients_per_vmap
            and (self._queue[0].samples, self._queue[0].late) == alike
        ):
            tasks.append(self._queue.popleft())
        return tuple(tasks)

    def _give(self, own: LinearFit, thief: LinearFit) -> tuple[ClientTask, ...]:
        """From the tail, as long as the other ends no later with it than this executor would."""
        left_s = sum(own.seconds(t.samples) for t in self._queue)
        given: deque[ClientTask] = deque()
        given_s = 0.0
        while self._queue and given_s + thief.seconds(self._queue[-1].samples) <= left_s:
            task = self._queue.pop()
            left_s -= own.seconds(task.samples)
            given_s += thief.seconds(task.samples)
            given.appendleft(task)
        return tuple(given)
