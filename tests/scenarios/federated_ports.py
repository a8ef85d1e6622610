"""One federated scenario, played by the simulator and by executors over TCP."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import numpy as np

from isthmus.errors import PeerError
from isthmus.federated import AlgorithmSpec, ClientTrainer, Server, TrainingTask, load_algorithm
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.emulated_speed import Pacer
from isthmus.federated.resident import Resident
from isthmus.federated.site import Site
from isthmus.federated.task_spec import TaskSpec
from isthmus.models import ModelSpec
from isthmus.protocol.federated_messages import ExecutorJoined, LinearFit, PhaseId
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.runtime.federated.executor import Executor, take_part
from isthmus.runtime.federated.host import ConnectionPolicy, FederatedHost, over_networks
from isthmus.runtime.federated.site_runner import SiteExecutor, SiteLink
from isthmus.runtime.federated.update_receiver import SiteUpdateReceiver, SumsReceiver
from isthmus.runtime.messages.federated import FromExecutor, TaskMessage
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.transport.channel import SocketChannel, dial
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.message_sender import MessageSender
from isthmus.runtime.transport.reconnection import CoordinatorConnection, OpenConnection, direct
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts
from isthmus_testing.virtual_runs import simulate_federated
from tests.federated.populations import LOCAL, module, population
from tests.federated.twins import SEED

from .federated_decisions import Recorded

Port = Literal["simulated", "real"]
RUN = "a" * 32
TIMEOUT_S, LIMIT_S = 20.0, 60.0
QUICK_S = 0.1
"""A client's time in the simulation, where the scenario says nothing else."""


class Slow(msgspec.Struct, frozen=True):
    """What a client waits for before it ends: in a run words that the coordinator heard or told, in a simulation the
    seconds after which that has happened."""

    until: str
    seconds: float


class Departure(msgspec.Struct, frozen=True):
    """An executor's connection ends, as soon as the coordinator has told these words; and comes back."""

    executor: str
    after: str
    seconds: float
    back: str = ""
    """Words after which it connects again; empty: never."""
    back_s: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What happens, to which run."""

    executors: str = "abc"
    """A letter for each."""
    sites: bool = False
    """Whether each executor has one client, whose data it alone has."""
    clients: int = 9
    """Of all executors without data of their own; of those that have, as many as executors."""
    rules: RoundRules
    slow: Mapping[tuple[str, int], Slow] = {}
    """By executor and round; of its first client in that round."""
    departs: Departure | None = None


def play(port: Port, scenario: Scenario) -> str:
    """The decisions of its whole run, a line each."""
    count = len(scenario.executors) if scenario.sites else scenario.clients
    everyone = np.arange(count)
    gathering = ExecutorChurn(start=len(scenario.executors), wait_s=1.0) if scenario.sites else None
    rules = msgspec.structs.replace(scenario.rules, needed=count, gathering=gathering)
    machine = Recorded(
        scenario.executors,
        rules,
        np.zeros(count, dtype=np.int64) if scenario.sites else population(count).sizes,
        lambda _: machine.here if scenario.sites else everyone,
        ThroughputModel(len(scenario.executors), window_rounds=5),
        clients={name: number for number, name in enumerate(scenario.executors)} if scenario.sites else None,
    )
    machine.record()
    with contextlib.suppress(PeerError):  # how it ended is a decision too
        _simulate(scenario, machine) if port == "simulated" else _Run(scenario, machine).run()
    return machine.text()


def _simulate(scenario: Scenario, machine: Recorded) -> None:
    names, departs = scenario.executors, scenario.departs
    begun: set[tuple[str, int]] = set()

    def factor(executor: int, phase: PhaseId) -> float:
        slow = scenario.slow.get(key := (names[executor], phase.round))
        first = key not in begun
        begun.add(key)
        return slow.seconds if slow is not None and first else QUICK_S

    costs = FederatedCosts(
        lines=(LinearFit(0.0, 1.0),) * len(names),
        latency_s=0.001,
        factor=factor,
        sites=tuple(population(len(names)).sizes.tolist()) if scenario.sites else (),
    )
    faults: list[Fault] = []
    if departs is not None:
        lasts_s = departs.back_s - departs.seconds if departs.back else math.inf
        faults.append(Fault(device=departs.executor, time_s=departs.seconds, lasts_s=lasts_s))
    simulate_federated(machine, costs, faults=faults)


class _Run:
    """Executors in threads of this process, over loopback."""

    def __init__(self, scenario: Scenario, machine: Recorded) -> None:
        self._scenario = scenario
        self._machine = machine
        self._data = population(len(scenario.executors) if scenario.sites else scenario.clients)
        self._task = TrainingTask(
            algorithm=load_algorithm(AlgorithmSpec(name="fedavg", options={})), local=LOCAL, seed=SEED
        )
        self._channels: dict[str, SocketChannel] = {}

    def run(self) -> None:
        resident = Resident(module())
        server = Server(self._task.algorithm, resident.vector(), resident.buffers(), len(self._data.clients))
        host = self._host(server)
        listener = Listener("127.0.0.1", timeout_s=TIMEOUT_S)
        listener.start(host.acceptor.on_connection)
        for name in self._scenario.executors:
            self._start(self._execute, name, listener.port)
        if self._scenario.departs is not None:
            self._start(self._depart, self._scenario.departs, listener.port)
        try:
            host.coordinate()
        finally:
            listener.close()

    def _host(self, server: Server) -> FederatedHost:
        numbers = {name: number for number, name in enumerate(self._scenario.executors)}
        policy = ConnectionPolicy(run=RUN, timeout_s=TIMEOUT_S)
        receiver = SumsReceiver(server)
        if self._scenario.sites:
            policy = over_networks(RUN, TIMEOUT_S)
            receiver = SiteUpdateReceiver(
                server,
                numbers,
                self._task_spec,
                AdmissionRules(),
                RUN,
                lambda _: None,
                rounds_late=self._machine.rounds_late,
            )
        return FederatedHost(self._machine, server, receiver, policy, committed=lambda *_: None)

    def _task_spec(self, client: int) -> TaskSpec:
        return TaskSpec(
            job="scenario",
            run=RUN,
            model=ModelSpec(name="mlp"),
            local=LOCAL,
            seed=SEED,
            client=client,
            algorithm=AlgorithmSpec(name="fedavg", options={}),
        )

    @staticmethod
    def _start(act: Callable[..., None], *given: object) -> None:
        threading.Thread(target=act, args=given, daemon=True).start()

    def _lasts(self, name: str) -> Callable[[float, int], float]:
        begun: set[int] = set()

        def lasts(seconds: float, round_: int) -> float:
            slow = self._scenario.slow.get((name, round_))
            if slow is not None and round_ not in begun:
                begun.add(round_)
                assert self._machine.wait_for(slow.until, LIMIT_S), f"{name} waits for {slow.until!r}"
            return seconds

        return lasts

    def _execute(self, name: str, port: int) -> None:
        channel = dial("127.0.0.1", port, "coordinator", TIMEOUT_S)
        self._channels[name] = channel
        take = self._as_site if self._scenario.sites else self._as_executor
        join = JoinRun(run=RUN, device=name, host="", port=0)
        connection = CoordinatorConnection(lambda: direct(channel), lambda: join, run=RUN, timeout_s=TIMEOUT_S)
        with contextlib.suppress(PeerError):  # its connection was closed
            take_part(connection, functools.partial(take, name))

    def _as_executor(self, name: str, connection: OpenConnection[MessageSender]) -> None:
        trainer = ClientTrainer(self._task, module(), self._data, None, pacer=Pacer(self._lasts(name)))
        connection.sender.put(FromExecutor(run=RUN, body=ExecutorJoined()))
        Executor(trainer, connection, 1).run()

    def _as_site(self, name: str, connection: OpenConnection[MessageSender]) -> None:
        while isinstance(message := connection.next()[0], Heartbeat):
            pass
        assert isinstance(message, TaskMessage)
        site = Site(self._task, module(), self._data, None, pacer=Pacer(self._lasts(name)))
        samples = int(self._data.sizes[self._scenario.executors.index(name)])
        connection.sender.put(FromExecutor(run=RUN, body=ExecutorJoined(samples=samples)))
        SiteExecutor(site, SiteLink(name=name, connection=connection, log=lambda _: None)).run()

    def _depart(self, departure: Departure, port: int) -> None:
        assert self._machine.wait_for(departure.after, LIMIT_S)
        self._channels[departure.executor].close()
        if departure.back:
            assert self._machine.wait_for(departure.back, LIMIT_S)
            self._execute(departure.executor, port)
