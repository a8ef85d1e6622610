"""Federated rounds on a virtual clock: the machines of a real run, with modelled times for clients and messages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.combinations import refused
from isthmus.errors import InternalError, unknown_name
from isthmus.programs.masked import MaskedRoundPort, TakeMasksOff, Unmasking
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_executor import ExecutorPort, FederatedExecutor
from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    ClientTime,
    ExecutorJoined,
    ExecutorOrder,
    LinearFit,
    PhaseId,
    PhaseOpened,
    PhaseReport,
    SumsSent,
    TasksGranted,
    TasksReturned,
)
from isthmus.protocol.secure_messages import SecureOrder, SecureReport
from isthmus.session.session import CLOSED
from isthmus.simulator.clock import Jitter
from isthmus.simulator.options import Fault, RecoveryTimes, SimulationOptions, WithoutEffect
from isthmus.simulator.parties import Connections, Parties, Party, SimulatedHost, Strikes
from isthmus.simulator.secrets import SimulatedSecrets


class MessageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one executor's messages. Durations of messages with values are given by pass."""

    to_s: float = 0.0  # latency of a message to the executor
    from_s: float = 0.0  # latency of its own messages
    broadcast_s: tuple[float, ...] = (0.0,)  # the broadcast's bytes, after the latency
    sums_s: tuple[float, ...] = (0.0,)  # the sums' bytes, after the latency
    collected_s: tuple[float, ...] = (0.0,)
    """Besides, for each client in a message with sums: values that are collected."""


class FederatedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of training and of messages. Times of clients are lines times log-normal noise of mean 1."""

    lines: tuple[LinearFit, ...]  # the true line of every executor; the coordinator must estimate it
    noise: float = 0.0  # the noise's sigma
    between_s: float = 0.0
    """From one client's end to the next one's beginning, on any executor: no client's time has it."""
    latency_s: float = 0.0  # seconds that a message takes, either way
    broadcast_s: float = 0.0  # from a phase's opening until an executor has the model
    sums_s: float = 0.0  # until the coordinator has an executor's sums
    messages: tuple[MessageCosts, ...] = ()  # costs of every executor by itself, in place of the three figures above
    clients_per_vmap: int = 1  # clients of equal numbers of samples that are trained as one
    factor: Callable[[int, PhaseId], float] = lambda executor, phase: 1.0
    """(executor, phase) -> how much slower it is then."""
    used: Callable[[int], int] = lambda samples: samples  # returns how many of a client's samples are trained on
    moves_s: Callable[[int, int], float] | None = None
    """(executor, executor) -> seconds of a client's state from the one that keeps it to the one that trains the client;
    None where no states move."""
    sites: tuple[int, ...] = ()
    """Samples of each executor's only client, which has the executor's number; empty: executors have all clients."""


class SimulatedRound(msgspec.Struct, frozen=True, kw_only=True):
    record: RoundRecord
    seconds: float  # from its opening to its commit
    busy_s: NDArray[np.float64]  # (executors,) seconds of training


class SimulatedFederation(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, also one that could not go on."""

    rounds: tuple[SimulatedRound, ...]  # committed ones
    notes: tuple[tuple[float, str], ...]  # notes of the coordinator, by second of the run
    finish: Finish
    seconds: float  # until the coordinator finished
    without_effect: WithoutEffect = ()


def check_round_faults(faults: Sequence[Fault], executors: Sequence[str], *, sites: bool) -> None:
    """UserError for faults that no executor, or site, can have."""
    for fault in faults:
        if fault.kind == "link":
            raise refused("faults of links", "federated", f"{fault.device}:{fault.other}")
        if fault.kind != "coordinator" and fault.device not in executors:
            raise unknown_name(f"executor in {fault.option}", fault.device, executors)
        if fault.kind in ("lost", "silent") and not sites and math.isfinite(fault.lasts_s):
            raise refused("devices that return", "executors", f"{fault.device!r} with a time after which it is back")


def simulate_federation(
    make: Callable[[int], Rounds], costs: FederatedCosts, seed: int = 0, faults: Sequence[Fault] = ()
) -> SimulatedFederation:
    """The run until its end, whatever that is. The same seed gives the same run. `make` returns the coordinator that
    begins after so many committed rounds, the saved ones of which are its own. UserError: as `check_round_faults`."""
    return RoundsSimulation(make, costs, seed, faults).run()


Moves = Mapping[tuple[str, str], Sequence[int]]
"""Clients that moved, by the executor that took them and the one that had them."""
MOST_NAMED = 8  # clients in one line; of more than a few, their number


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


class _Executor(ExecutorPort):
    """An executor's process: one thing after another. It has neither sums nor states, and the broadcast comes with its
    order."""

    def __init__(self, number: int, name: str, device: Party[_Executor], world: RoundsSimulation) -> None:
        self.number, self.name, self.device, self._world = number, name, device, world
        self.secrets: SimulatedSecrets | None = None
        self.connect()

    def connect(self) -> None:
        """Work that an earlier connection had under way is void."""
        self.policy = FederatedExecutor(self, self._world.costs.clients_per_vmap)
        self._due: deque[SumsSent | tuple[PhaseId, Sequence[ClientTask]]] = deque()
        self._trains = False
        self.secrets = self._world.secrets_of(self.name, self)

    def ordered(self, order: ExecutorOrder | SecureOrder) -> None:
        if self.secrets is not None:
            self.secrets.policy.ordered(order)
        if not isinstance(order, SecureOrder):
            self.policy.ordered(order)
            self._act()

    def _act(self) -> None:
        while self._due and not self._trains:
            match self._due.popleft():
                case SumsSent() as sums if self.secrets is not None:
                    self.secrets.policy.trained(sums)
                case SumsSent() as sums:
                    self.answer(sums)
                case phase, _ if not self.policy.works_for(phase):
                    self.policy.trained(phase, ())
                case phase, tasks:
                    self._trains = True
                    timed = self._world.trained(self, phase, tasks)
                    seconds = sum(t.seconds for t in timed) + self._world.costs.between_s
                    end = partial(self._trained, self.policy, phase, timed)
                    self._world.later(seconds, self.name, partial(self._world.on, self.device, end))

    def _trained(self, policy: FederatedExecutor, phase: PhaseId, timed: Sequence[ClientTime]) -> None:
        if policy is self.policy:
            self._trains = False
            policy.trained(phase, timed)
            self._act()

    # What the policy asks

    def train(self, phase: PhaseId, tasks: Sequence[ClientTask]) -> None:
        self._due.append((phase, tasks))

    def answer(self, report: PhaseReport | SecureReport) -> None:
        self._world.report(self, report)

    def send_sums(self, sums: SumsSent) -> None:
        self._due.append(sums)


class RoundsSimulation(Parties[_Executor], MaskedRoundPort):
    """One run. There are no values and no model. Executors' processes are known, and stay lost; sites come back by
    themselves."""

    def __init__(
        self, make: Callable[[int], Rounds], costs: FederatedCosts, seed: int, faults: Sequence[Fault] = ()
    ) -> None:
        session = self._connected(make(0))
        timeout_s = session.rules.timeout_s
        super().__init__(
            SimulationOptions(faults=tuple(faults), seed=seed, recovery=RecoveryTimes(timeout_s=timeout_s))
        )
        check_round_faults(faults, session.executors, sites=bool(costs.sites))
        self.costs, self._make = costs, make
        self._jitter = Jitter(costs.noise, seed)
        passes = session.rules.passes
        every = MessageCosts(
            to_s=costs.latency_s,
            from_s=costs.latency_s,
            broadcast_s=(costs.broadcast_s,) * passes,
            sums_s=(costs.sums_s,) * passes,
            collected_s=(0.0,) * passes,
        )
        self._messages = costs.messages or (every,) * len(session.executors)
        self._numbers = {name: number for number, name in enumerate(session.executors)}
        self._secrets: dict[str, SimulatedSecrets] = {}
        self._opened_s = self._ended_s = self._lost_s = 0.0
        self._moves: dict[tuple[str, str], list[int]] = {}  # clients that moved in the open round
        self._returned: tuple[str, TasksReturned] | None = None
        """The report that the machine hears: who gives back which clients."""
        self._phase: PhaseId | None = None  # that was opened last
        self._rounds: list[SimulatedRound] = []
        self._notes: list[tuple[float, str]] = []
        self.connections = Connections(self, self._options, self)
        self.strikes = Strikes(self, self.connections, self._options, self._restart, sees=not costs.sites)
        self.host = SimulatedHost(session, self.clock, self.strikes, regular=False)

    def _connected(self, machine: Rounds) -> Rounds:
        machine.port, machine.notes_waits = self, False
        return machine

    def run(self) -> SimulatedFederation:
        later = {fault.device for fault in self._options.faults if fault.kind == "join"}
        self.host.tell(lambda _: None, looks=True)
        for name in self._numbers:
            if name not in later:
                self.clock.at(0.0, name, partial(self.connections.join, name))
        for fault in self._options.faults:
            self.clock.at(fault.time_s, fault.device, partial(self._strike, fault))
        self.clock.run()
        session = self.host.session
        finish = session.finish
        if finish is None and self._lost_s and not self.devices:
            finish = Finish("lost", "every executor is lost, and a run would wait for them")
            self._ended_s = self._lost_s
        if finish is None and (waiting := session.waiting) is not None:
            reason = f"{len(self.devices)} executors came, and a run would wait for {waiting.needed}"
            finish, self._ended_s = Finish("lost", reason), self.clock.now_s
        if finish is None:
            raise InternalError("federated simulation: nobody has anything to do, and the run is not over")
        return SimulatedFederation(
            rounds=tuple(self._rounds),
            notes=tuple(self._notes),
            finish=finish,
            seconds=self._ended_s,
            without_effect=self.effects.without,
        )

    # Executors

    def made(self, worker_id: str, device: Party[_Executor]) -> _Executor:
        return _Executor(self._numbers[worker_id], worker_id, device, self)

    def arrived(self, worker: _Executor) -> None:
        worker.connect()
        sites = self.costs.sites
        self.host.tell(lambda rounds: rounds.joined(worker.name))
        joined = ExecutorJoined(samples=sites[worker.number] if sites else None)
        self.host.tell(lambda rounds: rounds.heard(worker.name, joined))

    def disconnected(self, device: str, reason: str) -> None:
        if not self.costs.sites:  # it ends with its connection
            self.devices.pop(device, None)
        self.connections.hang_up(device)
        self.host.disconnected(device, reason)

    def kill(self, name: str) -> Party[_Executor] | None:
        self._lost_s = self.clock.now_s
        return super().kill(name)

    def secrets_of(self, name: str, executor: _Executor) -> SimulatedSecrets | None:
        if (secure := self.host.session.rules.secure) is not None:
            self._secrets[name] = SimulatedSecrets(name, secure, executor.answer, self._secrets.get(name))
        return self._secrets.get(name)

    def report(self, executor: _Executor, report: PhaseReport | SecureReport) -> None:
        costs, seconds = self._messages[executor.number], 0.0
        if isinstance(report, SumsSent) and report.timed:
            number = report.phase.number
            seconds = costs.sums_s[number] + len(report.timed) * costs.collected_s[number]
        self.connections.up(executor, partial(self._heard, executor.name, report), seconds, costs.from_s)

    def _heard(self, name: str, report: PhaseReport | SecureReport) -> None:
        self._returned = (name, report) if isinstance(report, TasksReturned) else None
        self.host.tell(lambda rounds: rounds.heard(name, report))
        self._returned = None

    def trained(self, executor: _Executor, phase: PhaseId, tasks: Sequence[ClientTask]) -> tuple[ClientTime, ...]:
        """Return how long clients take that the executor begins to train now."""
        number, costs = executor.number, self.costs
        line, factor = costs.lines[number], costs.factor(number, phase) * self.slowed(executor.name)

        def timed(task: ClientTask) -> ClientTime:
            seconds = self._moved_s(task, number) + line.seconds(costs.used(task.samples)) * factor * self._jitter()
            return ClientTime(task.client, task.samples, seconds, NONE if costs.moves_s is None else number)

        return tuple(timed(task) for task in tasks)

    def _moved_s(self, task: ClientTask, number: int) -> float:
        """A state's number is that of the executor that keeps it."""
        if self.costs.moves_s is None or task.state in (NONE, number):
            return 0.0
        return self.costs.moves_s(task.state, number)

    # Faults

    def _strike(self, fault: Fault) -> None:
        name = fault.device
        if self.connections.over:
            return
        self.strikes.struck(fault)
        if fault.kind == "join":
            self.connections.join(name)
        elif fault.kind == "leave" or (fault.kind == "silent" and math.isinf(fault.lasts_s)):
            after_s = 0.0 if fault.kind == "leave" else self._options.recovery.timeout_s
            reason = CLOSED if fault.kind == "leave" else f"silent for {after_s:g} s"
            if (party := self.kill(name)) is not None:
                self.connections.closed(party, reason, after_s)
        else:
            self.strikes.strike(fault)
            if fault.kind == "lost" and math.isfinite(fault.lasts_s):
                self.later(fault.lasts_s, name, partial(self.connections.join, name))
            elif fault.kind == "coordinator" and not self.costs.sites:
                self.devices.clear()  # they are its own processes

    def _restart(self) -> None:
        """The coordinator begins again after the newest round that is saved."""
        session = self._connected(self._make(len(self._rounds)))
        self._rounds = self._rounds[: session.rules.first_round]
        self._phase = None
        self.connections.answered = True
        self.note(f"the coordinator was started again: it goes on after round {session.rules.first_round}")
        self.host.replace(session)
        self.host.tell(lambda _: None, looks=True)
        for name in () if self.costs.sites else self._numbers:
            self.strikes.call(name)

    # What the machine asks

    def note(self, text: str) -> None:
        self._notes.append((self.clock.now_s, text))

    def notify(self, executor: str, order: ExecutorOrder) -> None:
        broadcast_s = 0.0
        if isinstance(order, PhaseOpened):
            broadcast_s = self._messages[self._numbers[executor]].broadcast_s[order.opening.phase.number]
            self._opened(order.opening.phase)
        elif isinstance(order, TasksGranted):
            self._moved(executor, order)
        self._order(executor, order, broadcast_s)

    def tell(self, site: str, order: SecureOrder) -> None:
        self._order(site, order, 0.0)

    def _order(self, executor: str, order: ExecutorOrder | SecureOrder, seconds: float) -> None:
        to_s = self._messages[self._numbers[executor]].to_s
        self.connections.down(executor, lambda one: one.ordered(order), seconds, to_s)

    def _opened(self, phase: PhaseId) -> None:
        before, self._phase = self._phase, phase
        if before is None or (before.round, before.attempt) != (phase.round, phase.attempt):
            self._moves = {}
        if before != phase:
            self.later(0.0, "under way", partial(self.host.tell, lambda rounds: rounds.under_way()))

    def _moved(self, thief: str, granted: TasksGranted) -> None:
        """Clients that one executor has just given back were granted to another."""
        if self._returned is not None:
            victim, report = self._returned
            returned = {task.client for task in report.tasks}
            if moved := [task.client for task in granted.tasks if task.client in returned]:
                self._moves.setdefault((thief, victim), []).extend(moved)

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        return Unmasking()

    def commit(self, record: RoundRecord) -> None:
        self._rounds.append(self._measured(record))
        for text in record_texts(record, self._moves):
            self.note(text)
        self._opened_s = self.clock.now_s

    def finished(self, finish: Finish) -> None:
        self._ended_s = self.clock.now_s
        self.connections.over = True

    def _measured(self, record: RoundRecord) -> SimulatedRound:
        busy_s = np.zeros(len(self._numbers))
        for name, timed in record.trained.items():
            busy_s[self._numbers[name]] = sum(t.seconds for t in timed)
        for name, seconds in record.earlier_s.items():
            busy_s[self._numbers[name]] += seconds
        return SimulatedRound(record=record, seconds=self.clock.now_s - self._opened_s, busy_s=busy_s)
