"""Federated rounds on a virtual clock: both machines as they are, links and training that take the time they are given.

Executors do one thing after another, as `runtime.federated.executor` does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np

from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    ClientTime,
    CommitRound,
    CoordinatorEvent,
    ExecutorDrained,
    ExecutorEvent,
    ExecutorJoined,
    FinishRounds,
    Notify,
    PhaseId,
    ReportDrained,
    ReportReturned,
    RoundRecord,
    SendSums,
    StartPhase,
    SumsSent,
    TasksReturned,
    TasksTrained,
    Tick,
    TrainTasks,
)
from isthmus.protocol.federated_executor import ExecutorMachine
from isthmus.protocol.federated_rules import ExecutorChurn, RoundRules
from isthmus.protocol.federated_throughput import ThroughputModel

TICK_S, LINK_S = 0.25, 0.001


class Rounds:
    """A run to its end: what was committed at which time, and how it ended."""

    def __init__(
        self,
        names: str,
        train_s: Callable[[str, PhaseId], float],
        *,
        sites: bool = True,
        clients: int = 0,
        **rules: object,
    ) -> None:
        """An executor for each letter of `names`: a site with a client of its own, or one that may train each of the
        run's `clients`."""
        count = len(names) if sites else clients
        gathering = ExecutorChurn(start=len(names), wait_s=1.0) if sites else None
        sizes = np.zeros(count, dtype=np.int64) if sites else np.arange(1, count + 1)
        self.machine = FederatedCoordinator(
            names,
            RoundRules(needed=count, gathering=gathering, **rules),
            sizes,
            lambda _: self.machine.here if sites else np.arange(count),
            ThroughputModel(len(names), window_rounds=5),
        )
        self.commits: list[tuple[float, RoundRecord]] = []
        self.finish: FinishRounds | None = None
        self.now_s = 0.0
        self.trained: list[tuple[str, PhaseId]] = []
        self._train_s = train_s
        self._executors = {name: ExecutorMachine() for name in names}
        self._acts: dict[str, deque[TrainTasks | SendSums]] = {name: deque() for name in names}
        self._busy: set[str] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._tell(Tick(now_s=0.0))
        for number, name in enumerate(names):
            own = {"client": number, "samples": 10} if sites else {}
            self._tell(ExecutorJoined(executor=name, **own))
        self._run()

    def _run(self) -> None:
        ticks = itertools.count(1)
        tick_s = TICK_S
        while self.finish is None:
            if self._due and self._due[0][0] <= tick_s:
                self.now_s, _, act = heapq.heappop(self._due)
                act()
            else:
                self.now_s, tick_s = tick_s, TICK_S * (next(ticks) + 1)
                self._tell(Tick(now_s=self.now_s))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), act))

    def _tell(self, event: CoordinatorEvent) -> None:
        for instruction in self.machine.handle(event):
            match instruction:
                case StartPhase(executor=name, event=broadcast) | Notify(executor=name, event=broadcast):
                    self._after(LINK_S, lambda name=name, notice=broadcast: self._hear(name, notice))
                case CommitRound(record=record):
                    self.commits.append((self.now_s, record))
                case FinishRounds():
                    self.finish = instruction
                case _:
                    pass

    def _hear(self, name: str, event: ExecutorEvent) -> None:
        for instruction in self._executors[name].handle(event):
            match instruction:
                case ReportDrained(phase=phase):
                    self._send(ExecutorDrained(executor=name, phase=phase))
                case ReportReturned(phase=phase, tasks=tasks):
                    self._send(TasksReturned(executor=name, phase=phase, tasks=tasks))
                case TrainTasks() | SendSums():
                    self._acts[name].append(instruction)
                case _:
                    pass
        self._act(name)

    def _send(self, event: CoordinatorEvent) -> None:
        self._after(LINK_S, lambda: self._tell(event))

    def _act(self, name: str) -> None:
        if name in self._busy or not self._acts[name]:
            return
        act = self._acts[name].popleft()
        self._busy.add(name)
        seconds = 0.0
        if isinstance(act, SendSums):
            self._send(SumsSent(executor=name, phase=act.phase, timed=act.timed, refused=act.refused))
        elif self._executors[name].works_for(act.phase):
            seconds = self._train_s(name, act.phase)
            self.trained.append((name, act.phase))
        self._after(seconds, lambda: self._ended(name, act, seconds))

    def _ended(self, name: str, act: TrainTasks | SendSums, seconds: float) -> None:
        self._busy.remove(name)
        if isinstance(act, TrainTasks):
            timed = tuple(ClientTime(task.client, task.samples, seconds) for task in act.tasks)
            self._hear(name, TasksTrained(phase=act.phase, timed=timed))
        self._act(name)
