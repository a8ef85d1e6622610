"""A federated executor: clients one after another, sums kept until they are asked for.

    idle ──opened──► training ──queue empty, holds──► drained ──granted──► training
                        │                                └──closed──► idle, sums sent
                        └──queue empty──► idle, sums sent

After it has sent its sums it may be granted more clients of the same phase (another executor was lost): sums add up in
any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    ExecutorDrained,
    ExecutorOrder,
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
from isthmus.protocol.run_messages import Halt
from isthmus.session.program import OVER, OutOfPhase, Policy

AHEAD = 16  # how many tasks are announced in advance. Reading this many states at once takes as long as reading a few.


class ExecutorPort(Protocol):
    """An executor asks this of its host."""

    def begin(self, opening: PhaseSetup) -> None:
        """Take the phase's broadcast; forget what is left of another phase."""

    def train(self, phase: PhaseId, tasks: Sequence[ClientTask]) -> None:
        """Train these (several only when they are trained together), fold them in, keep their states. Then say
        `trained`."""

    def answer(self, report: ExecutorDrained | TasksReturned) -> None:
        """Send this to the coordinator at once."""

    def send_sums(self, sums: SumsSent) -> None:
        """Send this with the sums, once everything before is done."""

    def forget(self, phase: PhaseId, kept: Sequence[int]) -> None:
        """Drop the sums, and the states that the phase has written of all clients but these."""

    def stop(self) -> None:
        """The run is over."""


class FederatedExecutor(Policy[ExecutorPort]):
    """One executor. `clients_per_vmap` clients of equal numbers of samples are trained as one where the host can do
    that."""

    def __init__(self, port: ExecutorPort, clients_per_vmap: int = 1) -> None:
        super().__init__("idle")
        self.port = port
        self._clients_per_vmap = clients_per_vmap
        self._phase_id: PhaseId | None = None
        self._queue: deque[ClientTask] = deque()
        self._busy = self._holds = self._reported = False
        self._dropped: set[PhaseId] = set()  # phases that ended while a client of theirs was trained
        self._timed: list[ClientTime] = []
        self._refused: list[RefusedUpdate] = []

    def works_for(self, phase: PhaseId) -> bool:
        return phase == self._phase_id

    @property
    def upcoming(self) -> tuple[ClientTask, ...]:
        """The tasks after those in work, the next first: their states may be read ahead."""
        return tuple(islice(self._queue, AHEAD))

    # What the coordinator orders

    def ordered(self, order: ExecutorOrder | Halt) -> None:
        match order:
            case _ if self.over:
                pass
            case Halt():
                self.phase = OVER
                self.port.stop()
            case PhaseOpened(opening=opening, tasks=tasks, holds=holds):
                self._open(opening, tasks, holds)
            case TasksRecalled(phase=phase, own=own, thief=thief):
                given = () if self._is_late(phase) else self._give(own, thief)
                self.port.answer(TasksReturned(phase=phase, tasks=given))
            case _ if self._is_late(order.phase):
                pass
            case TasksGranted(phase=phase, tasks=tasks, holds=holds):
                self._queue.extend(tasks)
                self._holds = holds
                self._next(phase)
            case PhaseClosed(phase=phase):
                self._holds = False
                self._next(phase)
            case PhaseDropped(phase=phase, kept=kept):
                if self._busy:
                    self._dropped.add(phase)
                self._phase_id = None
                self._clear()
                self.port.forget(phase, kept)
            case UpdateRefused():
                pass

    # What its host says

    def trained(self, phase: PhaseId, timed: Sequence[ClientTime], refused: Sequence[RefusedUpdate] = ()) -> None:
        """The tasks that it was given are trained and folded in, but for those that were refused."""
        if self.over:
            return
        if self._is_late(phase):
            if phase in self._dropped:
                self._dropped.remove(phase)
                self.port.answer(ExecutorDrained(phase=phase))  # before this, no other phase waits for this executor
            return
        if self.phase != "training":
            raise OutOfPhase(f"clients were trained in phase {self.phase!r}")
        self._busy = False
        self._timed += timed
        self._refused += refused
        self._next(phase)

    def _is_late(self, phase: PhaseId) -> bool:
        self.stale += phase != self._phase_id
        return phase != self._phase_id

    def _open(self, opening: PhaseSetup, tasks: Sequence[ClientTask], holds: bool) -> None:
        self._clear()
        self._phase_id, self._holds = opening.phase, holds
        # What still trains belongs to the phase before: its `trained` is late, and must not hold this one up.
        self._busy = False
        self._queue.extend(tasks)
        self.port.begin(opening)
        self._next(opening.phase)

    def _clear(self) -> None:
        self._queue.clear()
        self._timed, self._refused = [], []
        self._reported = False
        self.phase = "idle"

    def _next(self, phase: PhaseId) -> None:
        if self._busy:
            return
        if self._queue:
            self._busy, self._reported, self.phase = True, False, "training"
            self.port.train(phase, self._next_tasks())
        elif not self._holds:
            sums = SumsSent(phase=phase, timed=tuple(self._timed), refused=tuple(self._refused))
            self._clear()
            self.port.send_sums(sums)
        elif not self._reported:
            self._reported, self.phase = True, "drained"
            self.port.answer(ExecutorDrained(phase=phase))

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
