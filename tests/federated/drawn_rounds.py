"""Rounds over sites without sockets or threads: the coordinator's host and the executors of sites, with what is on the
way between them. Before each message that arrives, others of its kind do of which an integer is drawn.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import shutil
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated import AlgorithmSpec, Server, StateForm, TrainingTask, load_algorithm
from isthmus.federated.admission import AdmissionRules, first_state
from isthmus.federated.resident import Resident
from isthmus.federated.robust import Aggregation
from isthmus.federated.site import Site, SiteStates, UpdateRules
from isthmus.federated.task_spec import TaskSpec
from isthmus.models import ModelSpec
from isthmus.programs.masked import MaskedRoundPort, MaskedRounds
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import (
    ExecutorJoined,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    SumsSent,
)
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_messages import SharesDisputed, SharesRevealed, UnmaskAsked
from isthmus.protocol.step_failures import MemoryShortage, StepFailure
from isthmus.runtime.federated.host import ConnectionPolicy, FederatedHost
from isthmus.runtime.federated.site_run import SecureUpdateReceiver
from isthmus.runtime.federated.site_runner import SecureSiteExecutor, SiteExecutor, SiteLink
from isthmus.runtime.federated.update_receiver import SiteUpdateReceiver
from isthmus.runtime.identity import Authority
from isthmus.runtime.identity.keys import DeviceSigner
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import FromExecutor, ToExecutor
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport.channel import in_host_memory
from isthmus.runtime.transport.message_sender import MessageSender
from isthmus.runtime.transport.reconnection import OpenConnection
from tests.drawn_integers import Lies, landed, received
from tests.federated.populations import LOCAL, ListedData, module, population
from tests.federated.twins import SEED
from tests.fleet_service.parties import certified
from tests.programs.ports import Recorder

NAMES = ("a", "b", "c", "d")
MOST = 64
"""Samples of a site under masks."""
RUN = "f" * 32
ATTEMPTS = 2
Frame = tuple[Any, list[Tensor]]


SHORTAGE = MemoryShortage(asked=1 << 30, free=1 << 29, total=1 << 31, reserved=1 << 28)
FAILURE = StepFailure(step=1, what="mm", reason="no memory", memory=True)
FAILED = FromExecutor(
    run=RUN, body=DeviceFailed(reason="no memory", fault="device", failure=FAILURE, shortage=SHORTAGE)
)


class OwnClient(ListedData):
    """One client, whatever its number."""

    def load(self, client: int) -> dict[str, Tensor]:
        return self.clients[0]


@dataclass
class Line:
    """A connection: what was sent and has not arrived."""

    frames: deque[Frame] = field(default_factory=deque)
    sent_bytes = received_bytes = 0

    def send(self, message: AnyMessage, payload: Sequence[memoryview] = ()) -> int:
        left = io.BytesIO(b"".join(payload))
        self.frames.append((message, in_host_memory(message, lambda buffer: left.readinto(buffer))))
        return 0

    def close(self) -> None:
        """Nobody does in a test that passes."""


class Doors:
    """In place of an acceptor: all sites have a connection."""

    def __init__(self, run: str, devices: Sequence[str], *, guard: Callable[[str, AnyMessage], None], **_: Any) -> None:
        self.guard = guard
        self.lines = {name: Line() for name in devices}

    def channel(self, name: str) -> Line:
        return self.lines[name]

    def close(self) -> None: ...


class _Checked:
    """A port whose calls are checked before they are passed on."""

    def __init__(self, port: Any, check: Callable[[str, Sequence[Any]], None]) -> None:
        self._port, self._check = port, check

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("_"):
            raise AttributeError(asked)
        act = getattr(self._port, asked)

        def ask(*given: Any) -> Any:
            self._check(asked, given)
            return act(*given)

        return ask


class DrawnRounds:
    """A run of `rounds` to its end. What becomes of it does not depend on the lies that come before the messages."""

    def __init__(
        self,
        folder: Path,
        algorithm: str,
        rounds: int,
        *,
        secure: bool,
        to_coordinator: Lies | None = None,
        to_sites: Lies | None = None,
    ) -> None:
        self.rounds, self.secure, self.folder = rounds, secure, folder
        self.to_coordinator, self.to_sites = to_coordinator, to_sites
        self.records: list[RoundRecord] = []
        self.told: list[tuple[str, str, PhaseId | None]] = []
        """Which site, what, in which phase."""
        self.revealed: list[tuple[str, PhaseId, tuple[str, ...], tuple[str, ...]]] = []
        self.notes: list[str] = []
        self.algorithm = load_algorithm(AlgorithmSpec(name=algorithm))
        self.data = [OwnClient([one]) for one in population(len(NAMES)).clients]
        self.aggregation = Aggregation(secure=True, most_samples=MOST) if secure else Aggregation()
        self.host = self._host()
        authority = Authority(folder / "authority")
        self.signers = {name: DeviceSigner(certified(authority, folder / name)) for name in NAMES} if secure else {}
        self.lines = {name: Line() for name in NAMES}
        """From the sites."""
        self.sites = {name: self._executor(name, self.lines[name], self._site(name)) for name in NAMES}

    # Both sides

    def task_spec(self, client: int) -> TaskSpec:
        return TaskSpec(
            job="clinics",
            run="0" * 32,
            algorithm=AlgorithmSpec(),
            model=ModelSpec(name="mlp"),
            local=LOCAL,
            seed=SEED,
            client=client,
            rounds=self.rounds,
            attempts=ATTEMPTS,
            sites=NAMES,
            minimum=2,
            aggregation=self.aggregation,
        )

    def _host(self) -> FederatedHost:
        resident = Resident(module())
        self.server = Server(self.algorithm, resident.vector(), resident.buffers(), len(NAMES))
        rules = RoundRules(
            rounds=self.rounds,
            passes=self.server.passes,
            needed=len(NAMES),
            quorum=0.75 if self.secure else 0.5,
            minimum=2,
            attempts=ATTEMPTS,
            staleness=0 if self.secure else 1,
            secure=self.task_spec(0).secure_rules,
            most_samples=MOST if self.secure else 0,
            gathering=ExecutorChurn(start=len(NAMES), wait_s=1.0),
        )
        machine = (MaskedRounds if self.secure else Rounds)(
            NAMES,
            rules,
            np.zeros(len(NAMES), dtype=np.int64),
            lambda round_: machine.here,
            ThroughputModel(len(NAMES), window_rounds=5),
            clients={name: number for number, name in enumerate(NAMES)},
            states=np.full(len(NAMES), -1, dtype=np.int32) if self.server.keeps else None,
        )
        kind = SecureUpdateReceiver if self.secure else SiteUpdateReceiver
        clients = {name: number for number, name in enumerate(NAMES)}
        self.receiver = kind(
            self.server, clients, self.task_spec, AdmissionRules(max_norm=None if self.secure else 1.0), RUN,
            self.notes.append, rounds_late=machine.rounds_late,
        )  # fmt: skip
        doors: Any = Doors
        policy = ConnectionPolicy(run=RUN, timeout_s=60.0, acceptor=doors)
        host = FederatedHost(
            machine, self.server, self.receiver, policy, committed=self._commit, note=self.notes.append
        )
        host._begun.set()
        host.look()
        host.session.port = self.port = _Checked(host, self._check_call)
        return host

    def _commit(self, record: RoundRecord, measure: object) -> None:
        self.records.append(record)
        self.host.session.durable_round = record.round

    def _site(self, name: str) -> Site:
        client = NAMES.index(name)
        first = first_state(self.algorithm, Resident(module()).vector())
        states = None if first is None else SiteStates(self.folder / "states" / name, StateForm(first))
        return Site(
            TrainingTask(algorithm=self.algorithm, local=LOCAL, seed=SEED),
            module(),
            self.data[client],
            states,
            rules=UpdateRules(stated_samples=MOST if self.secure else None, masked=self.secure),
        )

    def _executor(self, name: str, line: Line, site: Site) -> SiteExecutor:
        client = NAMES.index(name)
        channel: Any = line
        link = SiteLink(
            name=name,
            connection=OpenConnection(channel, MessageSender(channel, on_error=lambda _: None), RUN, 60.0),
            log=lambda _: None,
            check=partial(self.task_spec(client).check_order, passes=site.passes, samples=self._stated(client)),
        )
        rules = self.task_spec(client).secure_rules
        return SiteExecutor(site, link) if rules is None else SecureSiteExecutor(site, link, rules, self.signers[name])

    def _stated(self, client: int) -> int:
        return MOST if self.secure else int(self.data[client].sizes[0])

    def run(self) -> None:
        for name in NAMES:
            self._hear(name, JoinRun(run=RUN, device=name, host="", port=0), [])
            joined = ExecutorJoined(samples=self._stated(NAMES.index(name)))
            self.lines[name].send(FromExecutor(run=RUN, body=joined))
        order = random.Random(1)
        doors: Any = self.host.acceptor
        while ways := [(line, to) for to in NAMES for line in (self.lines[to], doors.lines[to]) if line.frames]:
            line, name = order.choice(ways)
            message, tensors = line.frames.popleft()
            if line is self.lines[name]:
                if self.to_coordinator is not None and isinstance(message.body, ExecutorJoined):
                    self.to_coordinator.about(FAILED, partial(self._hear_lie, name, ()), names=name)
                if self.to_coordinator is not None and self.secure and isinstance(message.body, SumsSent):
                    disputed = SharesDisputed(phase=message.body.phase, owners=tuple({*NAMES} - {name}))
                    lied = partial(self._hear_lie, name, ())
                    self.to_coordinator.about(FromExecutor(run=RUN, body=disputed), lied, names=name)
                if self.to_coordinator is not None and self.host.session.finish is None:
                    lied = partial(self._hear_lie, name, tensors)
                    self.to_coordinator.about(message, lied, names=name)
                self._hear(name, message, tensors)
            elif isinstance(message, ToExecutor):
                if self.to_sites is not None:
                    self.to_sites.about(message, partial(self._tell_lie, name, message, tensors), names="coordinator: ")
                self._tell(name, message, tensors)
                if self.to_sites is not None and isinstance(message.body, PhaseOpened):
                    dropped = PhaseDropped(phase=message.body.opening.phase, kept=(NAMES.index(name),), again=True)
                    lied = partial(self._tell_lie, name, drop := ToExecutor(run=RUN, body=dropped), ())
                    self.to_sites.about(drop, lied, names="coordinator: ")

    # What arrives at the coordinator

    def _hear(self, name: str, message: Any, tensors: Sequence[Tensor]) -> None:
        if isinstance(body := getattr(message, "body", None), SharesRevealed):
            shares = (tuple(share.site for share in of) for of in (body.seeds, body.keys))
            self.revealed.append((name, body.phase, *shares))
        then = self.host.on_message((name, message, [*tensors]))
        if then is not None:
            then()
        if self.host._failure is not None:
            raise self.host._failure

    def _hear_lie(self, name: str, tensors: Sequence[Tensor], lie: AnyMessage) -> None:
        assert isinstance(lie, FromExecutor)
        doors: Any = self.host.acceptor
        with named(name):
            _, landed_tensors = landed(lie, tensors, lambda message: doors.guard(name, message))
        # On a copy: an executor that is dismissed would have to join again.
        found = Recorder(MaskedRoundPort)
        right: Any = self.host.session
        machine: Any = copy.deepcopy(right, {id(self.port): _Checked(found, self._check_call)})
        machine._cohort_of = lambda round_: machine.here
        self.host.session = machine
        try:
            self.host.take((name, lie, landed_tensors))
            heard = len(found.asked)
            if machine.urgent:  # the sender is lost, which may end what others wait for
                self.host.look()
        finally:
            self.host.session = right
        receiver = copy.deepcopy(self.receiver, {id(one): one for one in (self, right)})
        if isinstance(lie.body, SumsSent):
            self.receiver.ignore(name)
        elif isinstance(lie.body, ExecutorJoined):
            self.receiver.hello(name)  # else it would have joined twice
        for asked, *given in found.asked[:heard]:
            if asked in ("merge", "ignore"):
                assert given[0] == name
            if asked == "merge":
                receiver.merge(name)
        if dismissed := [call[1:] for call in found.asked if call[0] == "dismiss"]:
            notes = [str(call[1]) for call in found.asked if call[0] == "note"]
            assert any(name in note and str(dismissed[0][1]) in note for note in notes)
            raise PeerError(", ".join(f"{executor} {reason}" for executor, reason in dismissed))
        self._check_phase(lie.body)

    def _check_phase(self, body: Any) -> None:
        """That it is one of the run."""
        if (phase := _phase(body)) is not None:
            assert 0 <= phase.round < self.rounds and 0 <= phase.attempt < ATTEMPTS
            assert 0 <= phase.number < self.server.passes

    def _check_call(self, asked: str, given: Sequence[Any]) -> None:
        """Of what the run can have, whoever said what."""
        match asked, *given:
            case "notify", name, PhaseOpened(opening=opening, tasks=tasks) as body:
                self._check_phase(body)
                assert [task.client for task in tasks] == [NAMES.index(name)]
                assert 1 <= opening.clients <= len(NAMES)
            case "commit", record:
                assert record.round < self.rounds
                trained = {name: [t.client for t in timed] for name, timed in record.trained.items()}
                assert trained == {name: [NAMES.index(name)] for name in trained}
            case "update_server", phase:
                assert phase.round < self.rounds
            case "tell", _, UnmaskAsked(summed=summed, dropped=dropped):
                assert len(set(summed)) >= 2 and not set(summed) & set(dropped)
            case "finished", finish:
                assert finish.outcome == "done", finish.reason
            case _:
                pass
        if asked in ("notify", "tell"):
            received(ToExecutor(run=RUN, body=given[1]))

    # What arrives at a site

    def _tell(self, name: str, message: ToExecutor, tensors: Sequence[Tensor]) -> None:
        self.told.append((name, type(message.body).__name__, _phase(message.body)))
        _take(self.sites[name], message, tensors)

    def _tell_lie(self, name: str, right: ToExecutor, tensors: Sequence[Tensor], lie: AnyMessage) -> None:
        assert isinstance(lie, ToExecutor)
        if lie == right:
            return
        line = Line()
        executor = self._copied(name, line)
        trained = _counted(executor.site)
        with named("coordinator"):
            _, landed_tensors = landed(lie, tensors)
        _take(executor, lie, landed_tensors)
        if isinstance(lie.body, Halt):
            assert executor.policy.over and not trained and not line.frames
            return
        self._check_phase(lie.body)
        opened = [phase for to, kind, phase in self.told if to == name and kind == "PhaseOpened" and phase is not None]
        if isinstance(lie.body, PhaseOpened):
            assert all(phase < lie.body.opening.phase for phase in opened), "a phase that was opened"
            self._check_opening(name, lie.body.opening)
        elif isinstance(lie.body, PhaseDropped):
            assert {*lie.body.kept} <= {NAMES.index(name)}, "a client of another site"
        else:
            assert lie.body.phase <= opened[-1], "a phase that was not opened"
        assert trained == [[NAMES.index(name)]] * isinstance(lie.body, PhaseOpened), "its own client, once"
        assert not any(isinstance(m.body, SharesRevealed) for m, _ in line.frames), "shares of another phase"
        for sent, _ in line.frames:
            received(sent)

    def _check_opening(self, name: str, opening: PhaseSetup) -> None:
        """What a round can have of which this site is a part."""
        assert -1 <= opening.durable_round < opening.phase.round and 1 <= opening.clients <= len(NAMES)
        others, own = opening.clients - 1, self._stated(NAMES.index(name))
        least, most = (MOST, MOST) if self.secure else (1, (1 << 40) - 1)
        assert own + others * least <= opening.samples <= own + others * most

    def _copied(self, name: str, line: Line) -> SiteExecutor:
        """The executor as it is, with states of its own."""
        right = self.sites[name]
        site: Any = copy.copy(right.site)
        if site._own_states is not None:
            folder = self.folder / "copy"
            shutil.rmtree(folder, ignore_errors=True)
            if site._own_states._folder.is_dir():
                shutil.copytree(site._own_states._folder, folder)
            site._states = site._own_states = SiteStates(folder, site._own_states._form)
        executor: Any = self._executor(name, line, site)
        executor._latest, executor.policy = right._latest, copy.deepcopy(right.policy, {id(right): executor})
        if isinstance(right, SecureSiteExecutor):
            policy: Any = copy.copy(right._secure)
            policy.port, policy._revealed = executor, dict(policy._revealed)
            executor._secure, executor._models = policy, dict(right._models)
            executor._secrets, executor._vector, executor._sizes = right._secrets, right._vector, right._sizes
        return executor


@contextlib.contextmanager
def named(party: str) -> Generator[None]:
    """As the channel names who sent what it refuses."""
    try:
        yield
    except PeerError as e:
        raise PeerError(f"{party}: {e}") from None


def _phase(body: Any) -> PhaseId | None:
    return body.opening.phase if isinstance(body, PhaseOpened) else getattr(body, "phase", None)


def _counted(site: Any) -> list[list[int]]:
    """The clients of each call to train."""
    found: list[list[int]] = []
    train = site.train

    def counted(tasks: Any) -> Any:
        found.append([task.client for task in tasks])
        return train(tasks)

    site.train = counted
    return found


def _take(executor: SiteExecutor, message: ToExecutor, tensors: Sequence[Tensor]) -> None:
    """As its two threads do, one after the other."""
    executor._take(message, tensors)
    while not executor._wakeups.empty():
        wakeup = executor._wakeups.get()
        if wakeup == "stop":
            return
        if isinstance(wakeup, Exception):
            raise wakeup
    executor._work_off()
