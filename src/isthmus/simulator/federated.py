"""Federated rounds on a virtual clock: the machines of a real run, with modelled times for clients and messages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.errors import InternalError, PeerError
from isthmus.programs.masked import TakeMasksOff, Unmasking
from isthmus.programs.merging import Finish
from isthmus.programs.round_records import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_executor import FederatedExecutor
from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    ClientTime,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorOrder,
    ExecutorReport,
    LinearFit,
    PhaseId,
    PhaseOpened,
    PhaseReport,
    PhaseSetup,
    SumsSent,
    TasksGranted,
    TasksReturned,
)
from isthmus.protocol.secure_messages import KeysListed, SecureOrder, SecureReport, SharesDelivered, UnmaskAsked
from isthmus.protocol.secure_stand_in import SimulatedSecrets
from isthmus.session.session import Observation
from isthmus.simulator.clock import VirtualClock


class MessageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one executor's messages. Durations of messages with values are given by pass."""

    to_s: float = 0.0
    """Latency of a message to the executor."""
    from_s: float = 0.0
    """Latency of its own messages."""
    broadcast_s: tuple[float, ...] = (0.0,)
    """The broadcast's bytes, after the latency."""
    sums_s: tuple[float, ...] = (0.0,)
    """The sums' bytes, after the latency."""
    collected_s: tuple[float, ...] = (0.0,)
    """Besides, for each client in a message with sums: values that are collected."""


class FederatedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of training and of messages. Times of clients are lines times log-normal noise of mean 1."""

    lines: tuple[LinearFit, ...]
    """The true line of every executor; the coordinator must estimate it."""
    noise: float = 0.0
    """The noise's sigma."""
    between_s: float = 0.0
    """From one client's end to the next one's beginning, on any executor: no client's time has it."""
    latency_s: float = 0.0
    """Seconds that a message takes, either way."""
    broadcast_s: float = 0.0
    """From a phase's opening until an executor has the model."""
    sums_s: float = 0.0
    """Until the coordinator has an executor's sums."""
    messages: tuple[MessageCosts, ...] = ()
    """Costs of every executor by itself, in place of the three figures above."""
    clients_per_vmap: int = 1
    """Clients of equal numbers of samples that are trained as one."""
    factor: Callable[[int, PhaseId], float] = lambda executor, phase: 1.0
    """(executor, phase) -> how much slower it is then."""
    used: Callable[[int], int] = lambda samples: samples
    """Returns how many of a client's samples are trained on."""
    moves_s: Callable[[int, int], float] | None = None
    """(executor, executor) -> seconds of a client's state from the one that keeps it to the one that trains the client;
    None where no states move."""
    sites: tuple[int, ...] = ()
    """Samples of each executor's only client, which has the executor's number; empty: executors have all clients."""
    joins: tuple[tuple[int, float], ...] = ()
    """(executor, second) that it connects first; infinity: never. Others connect at the beginning."""
    losses: tuple[tuple[int, float], ...] = ()
    """(executor, second) that it is lost: its process ends, or the site leaves."""
    cuts: tuple[tuple[int, float], ...] = ()
    """(executor, second) that its connection closes while its process goes on."""
    returns: tuple[tuple[int, float], ...] = ()
    """(executor, second) that a lost one connects again."""
    slows: tuple[tuple[int, float, float], ...] = ()
    """(executor, second, factor): clients that begin later take so many times as long, until its next entry."""


class SimulatedRound(msgspec.Struct, frozen=True, kw_only=True):
    record: RoundRecord
    seconds: float
    """From its opening to its commit."""
    busy_s: NDArray[np.float64]
    """(executors,) seconds of training."""


class SimulatedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event or an instruction of the coordinator, in words."""

    time_s: float
    """Since the run's beginning."""
    text: str


class SimulatedFederation(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, also one that could not go on."""

    rounds: tuple[SimulatedRound, ...]
    """Committed ones."""
    events: tuple[SimulatedEvent, ...]
    finish: Finish
    seconds: float
    """Until the coordinator finished."""


def simulate_federated(machine: Rounds, costs: FederatedCosts, seed: int = 0) -> tuple[SimulatedRound, ...]:
    """Every committed round. The same seed gives the same run. PeerError when the run cannot go on."""
    found = simulate_federation(machine, costs, seed)
    if found.finish.outcome == "lost":
        raise PeerError(found.finish.reason)
    return found.rounds


def simulate_federation(machine: Rounds, costs: FederatedCosts, seed: int = 0) -> SimulatedFederation:
    """The run until its end, whatever that is. The same seed gives the same run."""
    return _RoundsSimulation(machine, costs, seed).run()


Moves = Mapping[tuple[str, str], Sequence[int]]
"""Clients that moved, by the executor that took them and the one that had them."""
_Tell = Callable[[float, str, PhaseReport], None]
"""Seconds, the executor, its report."""
MOST_NAMED = 8
"""Clients in one line; of more than a few, their number."""


def record_texts(record: RoundRecord, moves: Moves | None = None) -> list[str]:
    """Return the lines about a committed round besides its clients: an early end, clients that others took, late
    updates."""
    found: list[str] = []
    if record.closed_by != "all":
        missing = f"; clients missing: {len(record.missing)}" if record.missing else ""
        by = {"behind": "without those behind"}.get(record.closed_by, f"by its {record.closed_by}")
        found.append(f"round {record.round + 1}: closed {by}{missing}")
    if moves:
        taken = (f"{thief} took {_clients(clients)} from {victim}" for (thief, victim), clients in moves.items())
        found.append(f"round {record.round + 1}: {'; '.join(taken)}")
    elif record.stolen:
        found.append(f"round {record.round + 1}: clients given to other executors: {record.stolen}")
    at = record.round + 1
    found += [f"client {client}: its update of round {at - late} counts in round {at}" for client, late in record.stale]
    return found


def _clients(numbers: Sequence[int]) -> str:
    if len(numbers) > MOST_NAMED:
        return f"{len(numbers)} clients"
    return f"client{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


class _SimulatedExecutor:
    """An executor's policy, and what it has still to do: one thing after another, as an executor's process does."""

    def __init__(
        self, number: int, name: str, clients_per_vmap: int, secrets: SimulatedSecrets | None, tell: _Tell
    ) -> None:
        self.number = number
        self.name = name
        self.policy = FederatedExecutor(self, clients_per_vmap)
        self.secrets = secrets
        self.due: deque[SumsSent | tuple[PhaseId, Sequence[ClientTask]]] = deque()
        self.trains = self.gone = False
        self._tell = tell

    # What the policy asks

    def begin(self, opening: PhaseSetup) -> None:
        """The broadcast has come with the order."""

    def train(self, phase: PhaseId, tasks: Sequence[ClientTask]) -> None:
        self.due.append((phase, tasks))

    def answer(self, report: PhaseReport) -> None:
        self._tell(0.0, self.name, report)

    def send_sums(self, sums: SumsSent) -> None:
        self.due.append(sums)

    def forget(self, phase: PhaseId, kept: Sequence[int]) -> None:
        """It has neither sums nor states."""

    def stop(self) -> None:
        """The simulation ends with its coordinator."""


class _RoundsSimulation:
    def __init__(self, machine: Rounds, costs: FederatedCosts, seed: int) -> None:
        self._machine = machine
        machine.port, machine.notes_waits = self, False
        self._costs = costs
        self._clock = VirtualClock(seed)
        self._draws = np.random.default_rng(seed)
        passes = machine.rules.passes
        every = MessageCosts(
            to_s=costs.latency_s,
            from_s=costs.latency_s,
            broadcast_s=(costs.broadcast_s,) * passes,
            sums_s=(costs.sums_s,) * passes,
            collected_s=(0.0,) * passes,
        )
        self._messages = costs.messages or (every,) * len(machine.executors)
        self._noise: deque[float] = deque()
        self._names = machine.executors
        self._numbers = {name: number for number, name in enumerate(machine.executors)}
        self._executors: dict[str, _SimulatedExecutor] = {}
        self._seen = Observation()
        """Processes that run or have ended; none is known of sites."""
        self._due_s: float | None = None
        """Seconds at which the next tick comes."""
        self._finish: Finish | None = None
        self._opened_s = 0.0
        self._ended_s = self._lost_s = 0.0
        self._moves: dict[tuple[str, str], list[int]] = {}
        """Clients that moved in the open round."""
        self._returned: tuple[str, TasksReturned] | None = None
        """The report that the machine hears: who gives back which clients."""
        self._has_opened = False
        self._attempt = (0, 0)
        """Round and attempt that were opened last."""
        self._rounds: list[SimulatedRound] = []
        self._events: list[SimulatedEvent] = []

    def run(self) -> SimulatedFederation:
        costs, later = self._costs, dict(self._costs.joins)
        joins = [(number, later.get(number, 0.0)) for number in range(len(self._names))]
        acts = ((self._join, joins), (self._lose, costs.losses), (self._cut, costs.cuts), (self._join, costs.returns))
        for act, times in acts:
            for number, time_s in times:
                if time_s < math.inf:
                    self._clock.at(time_s, name := self._names[number], partial(act, name))
        self._clock.run()
        if self._finish is None and self._last_lost_s is not None:
            reason = "every executor is lost, and a run would wait for them"
            self._finish, self._ended_s = Finish("lost", reason), self._last_lost_s
        if self._finish is None and (waiting := self._machine.waiting) is not None:
            reason = f"{len(self._executors)} executors came, and a run would wait for {waiting.needed}"
            self._finish, self._ended_s = Finish("lost", reason), self._clock.now_s
        if self._finish is None:
            raise InternalError("federated simulation: nobody has anything to do, and the run is not over")
        return SimulatedFederation(
            rounds=tuple(self._rounds), events=tuple(self._events), finish=self._finish, seconds=self._ended_s
        )

    @property
    def _last_lost_s(self) -> float | None:
        """None while an executor is there, or where none came."""
        executors = self._executors.values()
        return self._lost_s if executors and all(one.gone for one in executors) else None

    def note(self, text: str) -> None:
        self._events.append(SimulatedEvent(time_s=self._clock.now_s, text=text))

    # The coordinator

    def _join(self, name: str) -> None:
        number, sites = self._numbers[name], self._costs.sites
        secrets = None
        if (secure := self._machine.rules.secure) is not None:
            before = self._executors[name].secrets if name in self._executors else None
            secrets = SimulatedSecrets(name, secure, partial(self._tell_masked, name), before)
        executor = _SimulatedExecutor(number, name, self._costs.clients_per_vmap, secrets, self._tell)
        self._executors[name] = executor
        if not sites:
            self._seen = Observation(ended=self._seen.ended, starting=self._seen.starting | {name})
        self._decide(partial(self._machine.joined, name))
        self._hear_report(name, ExecutorJoined(samples=sites[number] if sites else None))

    def _lose(self, name: str) -> None:
        if not self._costs.sites:
            ended = {**self._seen.ended, name: "its process was killed by SIGKILL"}
            self._seen = Observation(ended=ended, starting=self._seen.starting - {name})
        self._cut(name)

    def _cut(self, name: str) -> None:
        if (executor := self._executors.get(name)) is None or executor.gone:
            return
        executor.gone = True
        self._lost_s = self._clock.now_s
        self._decide(partial(self._machine.disconnected, name))
        self._decide(self._look, looks=False)

    def _decide(self, call: Callable[[], None], *, looks: bool = True) -> None:
        """Most calls may open or close a phase: the machine learns the time first."""
        if self._finish is not None:
            return
        if looks:
            self._handle(self._look)
        self._handle(call)
        due_s = self._machine.due_s
        if self._finish is None and due_s is not None and due_s != self._due_s:
            self._due_s = due_s
            self._clock.at(max(due_s, self._clock.now_s), "tick", partial(self._tick, due_s))

    def _hear_report(self, name: str, report: ExecutorReport | SecureReport) -> None:
        self._returned = (name, report) if isinstance(report, TasksReturned) else None
        looks = not isinstance(report, ExecutorDrained | TasksReturned)
        self._decide(partial(self._machine.heard, name, report), looks=looks)
        self._returned = None

    def _tick(self, due_s: float) -> None:
        if self._due_s == due_s:
            self._due_s = None
            self._decide(self._look, looks=False)

    def _look(self) -> None:
        self._machine.clock(self._clock.now_s)
        self._machine.looked(self._seen)

    def _handle(self, call: Callable[[], None]) -> None:
        self._has_opened = False
        call()
        if self._has_opened:
            self._machine.under_way()

    # What the machine asks

    def notify(self, executor: str, order: ExecutorOrder) -> None:
        broadcast_s = 0.0
        if isinstance(order, PhaseOpened):
            phase = order.opening.phase
            self._has_opened, attempt = True, (phase.round, phase.attempt)
            if attempt != self._attempt:
                self._attempt, self._moves = attempt, {}
            broadcast_s = self._messages[self._numbers[executor]].broadcast_s[phase.number]
        elif isinstance(order, TasksGranted):
            self._moved(executor, order)
        self._later(broadcast_s, executor, order)

    def tell(self, site: str, order: SecureOrder) -> None:
        self._later(0.0, site, order)

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        return Unmasking()

    def commit(self, record: RoundRecord) -> None:
        self._rounds.append(self._measured(record))
        for text in record_texts(record, self._moves):
            self.note(text)
        self._opened_s = self._clock.now_s

    def finished(self, finish: Finish) -> None:
        self._finish, self._ended_s = finish, self._clock.now_s

    def merge(self, executor: str, phase: PhaseId) -> None:
        """There are no values."""

    def ignore(self, executor: str, phase: PhaseId) -> None:
        """There are no values."""

    def dismiss(self, executor: str, reason: str) -> None:
        """No executor lies."""

    def update_server(self, phase: PhaseId, opening: PhaseSetup | None = None) -> None:
        """There is no model."""

    def _moved(self, thief: str, granted: TasksGranted) -> None:
        """Clients that one executor has just given back were granted to another."""
        if self._returned is not None:
            victim, report = self._returned
            returned = {task.client for task in report.tasks}
            moved = [task.client for task in granted.tasks if task.client in returned]
            if moved:
                self._moves.setdefault((thief, victim), []).extend(moved)

    def _measured(self, record: RoundRecord) -> SimulatedRound:
        busy_s = np.zeros(len(self._numbers))
        for name, timed in record.trained.items():
            busy_s[self._numbers[name]] = sum(t.seconds for t in timed)
        for name, seconds in record.earlier_s.items():
            busy_s[self._numbers[name]] += seconds
        return SimulatedRound(record=record, seconds=self._clock.now_s - self._opened_s, busy_s=busy_s)

    def _later(self, seconds: float, name: str, event: ExecutorOrder | SecureOrder) -> None:
        due_s = self._clock.now_s + self._messages[self._numbers[name]].to_s + seconds
        self._clock.at(due_s, name, partial(self._arrive, self._executors[name], event))

    # Executors

    def _arrive(self, executor: _SimulatedExecutor, order: ExecutorOrder | SecureOrder) -> None:
        if executor.gone:
            return
        if executor.secrets is not None:
            executor.secrets.policy.ordered(order)
        match order:
            case KeysListed() | SharesDelivered() | UnmaskAsked():
                pass
            case _:
                executor.policy.ordered(order)
                self._act(executor)

    def _act(self, executor: _SimulatedExecutor) -> None:
        while executor.due and not executor.trains:
            match executor.due.popleft():
                case SumsSent() as sums if executor.secrets is not None:
                    executor.secrets.policy.trained(sums)
                case SumsSent() as sums:
                    self._tell_sums(executor.name, sums)
                case phase, _ if not executor.policy.works_for(phase):
                    executor.policy.trained(phase, ())
                case phase, tasks:
                    executor.trains = True
                    timed = self._train(executor.number, phase, tasks)
                    over_s = self._clock.now_s + sum(t.seconds for t in timed) + self._costs.between_s
                    self._clock.at(over_s, executor.name, partial(self._trained, executor, phase, timed))

    def _trained(self, executor: _SimulatedExecutor, phase: PhaseId, timed: Sequence[ClientTime]) -> None:
        executor.trains = False
        if not executor.gone:
            executor.policy.trained(phase, timed)
            self._act(executor)

    def _tell_sums(self, executor: str, sums: SumsSent) -> None:
        costs, number = self._messages[self._numbers[executor]], sums.phase.number
        timed = sums.timed
        values_s = costs.sums_s[number] + len(timed) * costs.collected_s[number] if timed else 0.0
        self._tell(values_s, executor, sums)

    def _tell_masked(self, executor: str, report: SecureReport | SumsSent) -> None:
        if isinstance(report, SumsSent):
            self._tell_sums(executor, report)
        else:
            self._tell(0.0, executor, report)

    def _tell(self, seconds: float, executor: str, report: PhaseReport | SecureReport) -> None:
        due_s = self._clock.now_s + self._messages[self._numbers[executor]].from_s + seconds
        self._clock.at(due_s, f"from {executor}", partial(self._hear_report, executor, report))

    def _train(self, number: int, phase: PhaseId, tasks: Sequence[ClientTask]) -> tuple[ClientTime, ...]:
        line, factor = self._costs.lines[number], self._costs.factor(number, phase)
        slow = [slow for who, since_s, slow in self._costs.slows if who == number and since_s <= self._clock.now_s]
        factor *= slow[-1] if slow else 1.0
        used, moves = self._costs.used, self._costs.moves_s is not None

        def timed(task: ClientTask) -> ClientTime:
            seconds = self._moved_s(task, number) + line.seconds(used(task.samples)) * factor * self._jitter()
            return ClientTime(task.client, task.samples, seconds, number if moves else NONE)

        return tuple(timed(task) for task in tasks)

    def _moved_s(self, task: ClientTask, number: int) -> float:
        """A state's number is that of the executor that keeps it."""
        if self._costs.moves_s is None or task.state in (NONE, number):
            return 0.0
        return self._costs.moves_s(task.state, number)

    def _jitter(self) -> float:
        sigma = self._costs.noise
        if not sigma:
            return 1.0
        if not self._noise:  # drawn many at once: a draw by itself takes as long as the rest of an event
            self._noise.extend(self._draws.lognormal(-(sigma**2) / 2, sigma, 4096).tolist())
        return self._noise.popleft()
