"""A federated executor: clients one after another, sums kept until they are asked for. Events in, instructions out.

    idle ──opened──► training ──queue empty, holds──► drained ──granted──► training
                        │                                └──closed──► idle, sums sent
                        └──queue empty──► idle, sums sent

After its sums are sent it may be granted more of the same turn (another executor was lost): sums add up in any order.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Literal

import msgspec

from isthmus.protocol.federated_events import (
    Begin,
    Closed,
    Dropped,
    ExecutorEvent,
    ExecutorInstruction,
    Forget,
    Granted,
    Halted,
    Line,
    Opening,
    Recalled,
    Refusal,
    Refused,
    SendSums,
    Stop,
    Task,
    TellDrained,
    TellReturned,
    Timed,
    Train,
    Trained,
    Turn,
    TurnOpened,
)

AHEAD = 16
"""Tasks that are told to be coming: to read the states of so many at once takes as long as to read a few."""


class ExecutorStatistics(msgspec.Struct, frozen=True):
    phase: Literal["idle", "training", "drained", "stopped"]
    waiting: int
    trained: int
    """Since it was made."""
    stale: int


class FederatedExecutor:
    """The machine. `together` clients of equal numbers of samples are trained as one where the driver can do that."""

    def __init__(self, together: int = 1) -> None:
        self._together = together
        self._turn: Turn | None = None
        self._queue: deque[Task] = deque()
        self._busy = self._holds = self._told = False
        self._dropped: set[Turn] = set()
        """Turns that were dropped while a client of theirs was trained."""
        self._phase: Literal["idle", "training", "drained", "stopped"] = "idle"
        self._timed: list[Timed] = []
        self._refused: list[Refusal] = []
        self._trained = self._stale = 0

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(self._phase, len(self._queue), self._trained, self._stale)

    def works_for(self, turn: Turn) -> bool:
        """Whether what is trained for this turn still counts."""
        return turn == self._turn

    @property
    def upcoming(self) -> tuple[Task, ...]:
        """What comes after the tasks in work, the next first: their states may be read ahead."""
        return tuple(islice(self._queue, AHEAD))

    def handle(self, event: ExecutorEvent) -> list[ExecutorInstruction]:
        """Take one event; return what to do now, in this order."""
        if isinstance(event, Halted):
            self._phase = "stopped"
            return [Stop()]
        if isinstance(event, TurnOpened):
            return self._open(event.opening, event.tasks, event.holds)
        if event.turn != self._turn:
            self._stale += 1
            if isinstance(event, Trained) and event.turn in self._dropped:
                self._dropped.remove(event.turn)
                return [TellDrained(event.turn)]  # until then this executor is waited for in no other turn
            return [TellReturned(event.turn, ())] if isinstance(event, Recalled) else []
        match event:
            case Granted(tasks=tasks, holds=holds):
                self._queue.extend(tasks)
                self._holds = holds
                return self._next()
            case Recalled(own=own, thief=thief):
                return [TellReturned(event.turn, self._give(own, thief))]
            case Closed():
                self._holds = False
                return self._next()
            case Refused():
                return []
            case Dropped(turn=turn, kept=kept):
                if self._busy:
                    self._dropped.add(turn)
                self._turn = None
                self._clear()
                return [Forget(turn, kept)]
            case Trained():
                self._busy = False
                self._trained += len(event.timed)
                self._timed += event.timed
                self._refused += event.refused
                return self._next()

    def _open(self, opening: Opening, tasks: tuple[Task, ...], holds: bool) -> list[ExecutorInstruction]:
        self._clear()
        self._turn, self._holds = opening.turn, holds
        # What still trains belongs to the turn before: its `Trained` is stale, and must not hold this one up.
        self._busy = False
        self._queue.extend(tasks)
        return [Begin(opening), *self._next()]

    def _clear(self) -> None:
        self._queue.clear()
        self._timed, self._refused = [], []
        self._told = False
        self._phase = "idle"

    def _next(self) -> list[ExecutorInstruction]:
        assert self._turn is not None
        if self._busy:
            return []
        if self._queue:
            self._busy, self._told, self._phase = True, False, "training"
            return [Train(self._turn, self._take())]
        if self._holds:
            if self._told:
                return []
            self._told, self._phase = True, "drained"
            return [TellDrained(self._turn)]
        timed, refused = tuple(self._timed), tuple(self._refused)
        turn = self._turn
        self._clear()
        return [SendSums(turn, timed, refused)]

    def _take(self) -> tuple[Task, ...]:
        tasks = [self._queue.popleft()]
        alike = tasks[0].samples, tasks[0].late
        while self._queue and len(tasks) < self._together and (self._queue[0].samples, self._queue[0].late) == alike:
            tasks.append(self._queue.popleft())
        return tuple(tasks)

    def _give(self, own: Line, thief: Line) -> tuple[Task, ...]:
        """From the tail, as long as the other ends no later with it than this executor would."""
        left_s = sum(own.seconds(t.samples) for t in self._queue)
        given: deque[Task] = deque()
        given_s = 0.0
        while self._queue and given_s + thief.seconds(self._queue[-1].samples) <= left_s:
            task = self._queue.pop()
            left_s -= own.seconds(task.samples)
            given_s += thief.seconds(task.samples)
            given.appendleft(task)
        return tuple(given)
