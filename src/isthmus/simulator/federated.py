"""Federated rounds on a virtual clock: the machines of a real run, with modelled times for clients and messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.errors import InternalError, PeerError
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    BeginPhase,
    ClientTask,
    ClientTime,
    CommitRound,
    CoordinatorEvent,
    ExecutorDrained,
    ExecutorEvent,
    ExecutorJoined,
    ExecutorLost,
    FinishRounds,
    LinearFit,
    Notify,
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
from isthmus.simulator.clock import VirtualClock


class FederatedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What things take. Times of clients are lines times log-normal noise of mean 1."""

    lines: tuple[LinearFit, ...]
    """Of every executor in truth; what the coordinator believes of them it must find out."""
    noise: float = 0.0
    """The noise's sigma."""
    between_s: float = 0.0
    """From one client's end to the next one's beginning, on any executor: no client's time has it."""
    latency_s: float = 0.0
    """Of a message, either way."""
    broadcast_s: float = 0.0
    """From a turn's opening until an executor has the model."""
    sums_s: float = 0.0
    """Until the coordinator has an executor's sums."""
    clients_per_vmap: int = 1
    """Clients of equal numbers of samples that are trained as one."""
    factor: Callable[[int, int], float] = lambda executor, round_: 1.0
    """(executor, round) -> how much slower it is then."""
    losses: tuple[tuple[int, float], ...] = ()
    """(executor, second) that it is lost."""


class SimulatedRound(msgspec.Struct, frozen=True, kw_only=True):
    record: RoundRecord
    seconds: float
    """From its opening to its commit."""
    busy_s: NDArray[np.float64]
    """(executors,) seconds of training."""


def simulate_federated(
    machine: FederatedCoordinator, costs: FederatedCosts, seed: int = 0
) -> tuple[SimulatedRound, ...]:
    """Every committed round. The same seed gives the same run. PeerError when the run cannot go on."""
    return _RoundsSimulation(machine, costs, seed).run()


class _RoundsSimulation:
    def __init__(self, machine: FederatedCoordinator, costs: FederatedCosts, seed: int) -> None:
        self._machine = machine
        self._costs = costs
        self._clock = VirtualClock(seed)
        self._draws = np.random.default_rng(seed)
        self._noise: deque[float] = deque()
        self._names = machine.executors
        self._executors = [ExecutorMachine(costs.clients_per_vmap) for _ in self._names]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._lost: set[int] = set()
        self._busy_s = [0.0 for _ in self._names]
        """By executor, until when it trains: it begins nothing else before, also of a newer round."""
        self._due_s: float | None = None
        """Of the tick that comes next."""
        self._finish: FinishRounds | None = None
        self._opened_s = 0.0
        self._rounds: list[SimulatedRound] = []

    def run(self) -> tuple[SimulatedRound, ...]:
        for name in self._names:
            self._clock.at(0.0, name, partial(self._decide, ExecutorJoined(executor=name)))
        for number, time_s in self._costs.losses:
            self._clock.at(time_s, "losses", partial(self._lose, number))
        self._clock.run()
        if self._finish is None:
            raise InternalError("federated simulation: nobody has anything to do, and the run is not over")
        if self._finish.outcome == "lost":
            raise PeerError(self._finish.reason)
        return tuple(self._rounds)

    def _lose(self, number: int) -> None:
        self._lost.add(number)
        self._decide(ExecutorLost(executor=self._names[number], reason="lost in the simulation"))

    def _decide(self, event: CoordinatorEvent) -> None:
        """The machine learns the time with whatever may open or close a phase."""
        if not isinstance(event, ExecutorDrained | TasksReturned | Tick):
            self._handle(Tick(now_s=self._clock.now_s))
        self._handle(event)
        due_s = self._machine.due_s
        if self._finish is None and due_s is not None and due_s != self._due_s:
            self._due_s = due_s
            self._clock.at(max(due_s, self._clock.now_s), "tick", partial(self._tick, due_s))

    def _tick(self, due_s: float) -> None:
        if self._finish is None and self._due_s == due_s:
            self._due_s = None
            self._decide(Tick(now_s=self._clock.now_s))

    def _handle(self, event: CoordinatorEvent) -> None:
        opened = False
        for instruction in self._machine.handle(event):
            match instruction:
                case StartPhase(executor=executor, event=notice):
                    opened = True
                    self._later(self._costs.broadcast_s, executor, notice)
                case Notify(executor=executor, event=notice):
                    self._later(0.0, executor, notice)
                case CommitRound(record=record):
                    self._rounds.append(self._measured(record))
                    self._opened_s = self._clock.now_s
                case FinishRounds():
                    self._finish = instruction
                case _:
                    pass
        if opened:
            self._machine.look_ahead()

    def _measured(self, record: RoundRecord) -> SimulatedRound:
        busy_s = np.zeros(len(self._names))
        for name, timed in record.trained.items():
            busy_s[self._number[name]] = sum(t.seconds for t in timed)
        for name, seconds in record.earlier_s.items():
            busy_s[self._number[name]] += seconds
        return SimulatedRound(record=record, seconds=self._clock.now_s - self._opened_s, busy_s=busy_s)

    def _later(self, seconds: float, executor: str, event: ExecutorEvent) -> None:
        number = self._number[executor]
        due_s = self._clock.now_s + self._costs.latency_s + seconds
        self._clock.at(due_s, executor, partial(self._act, number, event))

    def _act(self, number: int, event: ExecutorEvent) -> None:
        if number in self._lost:
            return
        name, now_s = self._names[number], self._clock.now_s
        for instruction in self._executors[number].handle(event):
            match instruction:
                case TrainTasks(phase=phase, tasks=tasks):
                    timed = self._train(number, phase.round, tasks)
                    done = TasksTrained(phase=phase, timed=timed)
                    begin_s = max(now_s, self._busy_s[number])
                    over_s = begin_s + sum(t.seconds for t in timed) + self._costs.between_s
                    self._busy_s[number] = over_s
                    self._clock.at(over_s, name, partial(self._act, number, done))
                case ReportDrained(phase=phase):
                    self._tell(0.0, ExecutorDrained(executor=name, phase=phase))
                case ReportReturned(phase=phase, tasks=tasks):
                    self._tell(0.0, TasksReturned(executor=name, phase=phase, tasks=tasks))
                case SendSums(phase=phase, timed=timed, refused=refused):
                    sums = SumsSent(executor=name, phase=phase, timed=timed, refused=refused)
                    self._tell(self._costs.sums_s, sums)
                case BeginPhase() | _:
                    pass

    def _tell(self, seconds: float, event: ExecutorDrained | TasksReturned | SumsSent) -> None:
        due_s = self._clock.now_s + self._costs.latency_s + seconds
        self._clock.at(due_s, f"from {event.executor}", partial(self._decide, event))

    def _train(self, number: int, round_: int, tasks: Sequence[ClientTask]) -> tuple[ClientTime, ...]:
        line, factor = self._costs.lines[number], self._costs.factor(number, round_)
        return tuple(ClientTime(t.client, t.samples, line.seconds(t.samples) * factor * self._jitter()) for t in tasks)

    def _jitter(self) -> float:
        sigma = self._costs.noise
        if not sigma:
            return 1.0
        if not self._noise:  # drawn many at once: a draw by itself takes as long as the rest of an event
            self._noise.extend(self._draws.lognormal(-(sigma**2) / 2, sigma, 4096).tolist())
        return self._noise.popleft()
