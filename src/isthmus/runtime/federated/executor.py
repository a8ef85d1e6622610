"""An executor's process: joins the coordinator of a federated run, trains the clients that it is asked to.

Model and algorithm are of this machine: code does not come over a link.

The main thread trains. A second thread receives, and answers recalls, which must not wait for a client to end. It also
trains the clients of a brief phase: waking the main thread takes as long as training a small client.

An executor on a device that joined a fleet trains simulated clients of a job that the fleet's coordinator names: model
and algorithm are those that are installed here, and the data are those that the device's owner allows. Where the whole
fleet is one owner's, the job may name code of the owner's own.

Clients' states of a run over a fleet are the coordinator's to keep: devices read and write them over their connection.
So a device that is lost takes no state with it, and what a device writes is on disk before its sums are counted: the
connection keeps the order.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.combinations import refused
from isthmus.data.registry import allowed
from isthmus.errors import PeerError, UserError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.job import FederatedJob
from isthmus.federated.server import Server
from isthmus.federated.states import StateFiles, StateForm, StateStore
from isthmus.models import model_names
from isthmus.models.registry import is_built_in
from isthmus.protocol.federated_executor import FederatedExecutor
from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorOrder,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    SumsSent,
    TasksReturned,
)
from isthmus.protocol.run_messages import Halt
from isthmus.protocol.secure_messages import KeysListed, SecureOrder, SharesDelivered, UnmaskAsked
from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.device.coordinator_link import AWAY_TIMEOUTS
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.federated.trainer import remote_trainer
from isthmus.runtime.federated.update_receiver import SharedMemory, SumsReceiver
from isthmus.runtime.identity.blinded_digests import ONE_OWNER
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import (
    FromExecutor,
    StateFileGiven,
    StateFileWanted,
    StateReport,
    StatesFound,
    StatesWanted,
    SummedValues,
    TaskMessage,
    ToExecutor,
    TrainClients,
)
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.processes.memory import ANY_SIZE, keep_freed_pages
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.channel import dial
from isthmus.runtime.transport.message_sender import SWITCH_S, MessageSender, headers_of
from isthmus.runtime.transport.reconnection import (
    CoordinatorConnection,
    OpenConnection,
    Outage,
    Retry,
    direct,
    reporting,
)
from isthmus.trackers import Track

MOST_AT_ONCE = 1 << 16  # states that one message asks for, or writes
LOOK_S = 0.5


class KeptStates:
    """The coordinator's side. One thread."""

    def __init__(self, folder: Path, form: StateForm) -> None:
        self._folder = folder
        self._files = StateFiles(str(folder), form.size_bytes, direct=False)
        found = (int(path.parent.name, 16) * 256 + int(path.stem, 16) for path in folder.glob("*/*.states"))
        self._next = max(found, default=-1) + 1

    def carry_out(
        self, report: StateReport, tensors: Sequence[Tensor]
    ) -> tuple[StatesFound | StateFileGiven, Tensor] | None:
        """Return the answer, and the states that go with it. PeerError for what no device of the run asks for,
        UserError for a full disk."""
        if isinstance(report, StateFileWanted):
            self._next += 1
            return StateFileGiven(number=self._next - 1), torch.empty(0)
        places = report.places
        if not 0 < len(places) <= MOST_AT_ONCE or max(places) >= self._next * self._files.per_file:
            raise PeerError(f"asked for {len(places)} states, of which one is in no file that was given")
        if report.writes:
            self._write(places, tensors)
            return None
        memory = self._files.accumulator(len(places))
        try:
            self._files.read(places, memory)
        except OSError:
            return StatesFound(), torch.empty(0)
        return StatesFound(), torch.from_numpy(memory)

    def _write(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        memory = self._files.accumulator(len(places))
        if [(t.dtype, tuple(t.shape)) for t in tensors] != [(torch.uint8, memory.shape)]:
            raise PeerError(f"wrote {len(places)} states of another size than the run's")
        memory[:] = tensors[0].numpy()
        try:
            self._files.write(places, memory)
        except OSError as e:
            raise UserError(f"states under {self._folder}: cannot be written: {e.strerror or e}") from None


class RemoteFiles(StateFiles):
    """A device's side: reads wait for the answer."""

    def __init__(self, form: StateForm, connection: OpenConnection[MessageSender]) -> None:
        super().__init__("states", form.size_bytes, direct=False)
        self._connection = connection
        self._asking = threading.Lock()
        self.answers: queue.SimpleQueue[tuple[StatesFound | StateFileGiven, Sequence[Tensor]]] = queue.SimpleQueue()
        """Is given what the coordinator sends."""

    def read(self, places: Sequence[int], memory: NDArray[np.uint8]) -> None:
        _, tensors = self._asked(StatesWanted(places=tuple(places), writes=False))
        if not tensors:
            raise FileNotFoundError(errno.ENOENT, "the coordinator does not have it", self.path(places[0]))
        if [(t.dtype, tuple(t.shape)) for t in tensors] != [(torch.uint8, memory.shape)]:
            raise PeerError("coordinator: sent states of another size than the run's")
        memory[:] = tensors[0].numpy()

    def write(self, places: Sequence[int], memory: NDArray[np.uint8]) -> None:
        sent = {"states": torch.from_numpy(np.ascontiguousarray(memory[: len(places)]))}
        body = StatesWanted(places=tuple(places), writes=True)
        message = FromExecutor(run=self._connection.run, body=body, tensors=headers_of(sent))
        self._connection.sender.put(message, list(sent.values()))
        self._connection.sender.flush()  # the memory is used again

    def unused(self) -> Iterator[int]:
        """Places in files that the coordinator gives this device alone."""
        while True:
            given, _ = self._asked(StateFileWanted())
            if not isinstance(given, StateFileGiven):
                raise PeerError("coordinator: gave no file for states")
            yield from range(given.number * self.per_file, (given.number + 1) * self.per_file)

    def _asked(self, body: StateReport) -> tuple[StatesFound | StateFileGiven, Sequence[Tensor]]:
        with self._asking:
            self._connection.sender.put(FromExecutor(run=self._connection.run, body=body))
            while not self._connection.ended.is_set():
                try:
                    return self.answers.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
        raise PeerError("coordinator: the connection ended while states were read")


COORDINATORS: dict[str, object] = {"callback": (), "track": Track(), "store": None, "metrics": (), "run_dir": "runs"}
"""Fields of a job that only the coordinator uses."""


def check_on_devices(job: FederatedJob) -> None:
    """UserError for a simulation whose executors cannot be devices."""
    runtime = job.runtime
    if job.scheme.per != "given":
        raise refused("an executor for each client", "joined executors", repr(runtime.scheme))
    for name, got in (("slow_down", runtime.slow_down), ("unstable", runtime.unstable), ("noise", runtime.noise)):
        if got:
            raise refused("emulation", "joined executors", got, f"runtime.{name}")


def on_devices(job: FederatedJob, start: int) -> FederatedJob:
    """The job for a run that begins with so many devices."""
    return msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, executors=start))


def request(job: FederatedJob, run: str, logs: Path, stop: Stop) -> RunRequest:
    """The run's call: devices that the job's fleet file names, or all."""
    fleet = job.executor_fleet(0) if job.fleet.endswith(".toml") else None
    return RunRequest(
        run=run,
        devices=(),
        others=() if fleet is None else tuple(fleet.names),
        anyone=fleet is None,
        timeout_s=job.timeout_s,
        threads=job.runtime.threads,
        logs=logs,
        role="executor",
        stop=stop,
    )


class DeviceSums(SumsReceiver):
    """Sums of devices, which receive the job first."""

    def __init__(
        self, server: Server, job: FederatedJob, run: str, fingerprint: str, states: KeptStates | None
    ) -> None:
        """`states` are those of clients, which devices read and write here."""
        super().__init__(server)
        self._states = states
        rate = job.local.tabled(job.federated.rounds).learning_rate
        told = msgspec.structs.replace(job, learning_rate=rate, fleet="", coordinator="", **COORDINATORS)
        self._order = TrainClients(run=run, job=msgspec.json.encode(told), fingerprint=fingerprint)

    def guard(self, executor: str, message: AnyMessage) -> None:
        if not (isinstance(message, FromExecutor) and isinstance(message.body, StateReport)):
            super().guard(executor, message)
        elif len(message.tensors) != (isinstance(message.body, StatesWanted) and message.body.writes):
            raise PeerError(f"sent {type(message.body).__name__} with {len(message.tensors)} tensors")

    def hello(self, executor: str) -> AnyMessage | None:
        return self._order

    def on_states(self, report: StateReport, tensors: Sequence[Tensor]) -> tuple[ToExecutor, list[Tensor]] | None:
        if self._states is None:
            raise PeerError("asked for states in a run without any")
        if (answer := self._states.carry_out(report, tensors)) is None:
            return None
        body, states = answer
        sent = {"states": states} if states.numel() else {}
        return ToExecutor(run=self._order.run, body=body, tensors=headers_of(sent)), list(sent.values())


Broadcast = dict[str, Tensor]
First = TypeVar("First", bound=TrainClients | TaskMessage)


class Executor:
    """The policy's host. Two threads act, never both at once."""

    def __init__(
        self,
        site: ClientTrainer,
        connection: OpenConnection[MessageSender],
        clients_per_vmap: int,
        shared: SharedMemory | None = None,
    ) -> None:
        """Without `shared` memory all values are sent."""
        self.policy = FederatedExecutor(self, clients_per_vmap)
        self.site = site
        self._connection = connection
        self._sender = connection.sender
        self._run = connection.run
        self._deciding = threading.Lock()
        self._acting = threading.Lock()
        self._acts: deque[Callable[[], None]] = deque()
        self._wakeups: queue.SimpleQueue[Exception | Literal["act", "stop"]] = queue.SimpleQueue()
        """Wakes the main thread: there are acts, or it is over."""
        self._broadcast: Broadcast = {}
        self._shared = shared
        if shared is not None:
            site.add_up_in(shared.accumulator.totals)

    def run(self) -> None:
        """Until halted. Raises what ended the connection, or training."""
        threading.Thread(target=self._listen, name="receive from coordinator", daemon=True).start()
        while (wakeup := self._wakeups.get()) != "stop":
            if isinstance(wakeup, Exception):
                raise wakeup
            with self._acting:
                self._work_off()
        self._sender.flush()

    def _work_off(self) -> None:
        """The caller holds the lock."""
        while self._acts:
            self._acts.popleft()()

    def _act(self, brief: bool) -> None:
        """In the thread that receives: what there is to do now, by itself or by the main thread."""
        if not brief or not self._acting.acquire(blocking=False):  # the other still trains for a phase before
            self._wakeups.put("act")
            return
        try:
            self._work_off()
        finally:
            self._acting.release()

    def _listen(self) -> None:
        try:
            self._connection.receive(self._take)
        except Exception as e:  # the main thread decides
            self._wakeups.put(e)

    def _take(self, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        if not isinstance(message, ToExecutor):  # a heartbeat
            return
        match body := message.body:
            case PhaseOpened(brief=brief):
                broadcast = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                if self._shared is not None:
                    broadcast |= self._shared.broadcast_memory.get(message.in_shared_memory)
                self._on_order(body, broadcast)
                self._broadcast = broadcast
                self._order(body)
                self._act(brief)
            case Halt():
                self._order(body)
            case StatesFound() | StateFileGiven():
                self.states_came(body, tensors)
            case KeysListed() | SharesDelivered() | UnmaskAsked():
                self._on_order(body, {})
            case _:
                self._on_order(body, {})
                self._order(body)
                self._act(brief=False)

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        """Before the policy: executors of one machine have no use for it."""

    def states_came(self, answer: StatesFound | StateFileGiven, tensors: Sequence[Tensor]) -> None:
        """An answer about states of clients."""
        raise PeerError(f"coordinator: sent {type(answer).__name__}, which was not asked for")

    def _order(self, order: ExecutorOrder | Halt) -> None:
        with self._deciding:
            self.policy.ordered(order)

    # What the policy asks: answers are sent at once, everything else is done in order by the thread that acts

    def begin(self, opening: PhaseSetup) -> None:
        self._acts.append(partial(self.site.open, opening, self._broadcast))

    def train(self, phase: PhaseId, tasks: Sequence[ClientTask]) -> None:
        self._acts.append(partial(self._train, phase, tasks, self.policy.upcoming))

    def answer(self, report: ExecutorDrained | TasksReturned) -> None:
        self._sender.put(FromExecutor(run=self._run, body=report))

    def send_sums(self, sums: SumsSent) -> None:
        self._acts.append(partial(self._send_sums, sums))

    def forget(self, phase: PhaseId, kept: Sequence[int]) -> None:
        self._acts.append(partial(self.site.forget, kept))

    def stop(self) -> None:
        self._wakeups.put("stop")

    def _train(self, phase: PhaseId, tasks: Sequence[ClientTask], upcoming: Sequence[ClientTask]) -> None:
        timed, refused = (), ()
        if self.policy.works_for(phase):  # else it was dropped while a client of an earlier phase was trained
            self.site.expect((*tasks, *upcoming))
            if self._shared is not None:
                self._shared.accumulator.wait(self._connection.timeout_s)
            timed, refused = self.site.train(tasks)
        with self._deciding:
            self.policy.trained(phase, timed, refused)

    def _send_sums(self, sums: SumsSent) -> None:
        own = self.site.partial
        tensors, shared_bounds = own.tensors(), None
        if self._shared is not None and (bounds := own.bounds()):
            shared_bounds = bounds
            tensors = {name: tensor for name, tensor in tensors.items() if name not in shared_bounds}
        self.site.hand_over()  # the last state is written while bounds are looked for
        if self._shared is not None and shared_bounds is not None:
            self._shared.accumulator.publish()
        values = SummedValues(weights=own.weights(), shared_bounds=shared_bounds)
        message = FromExecutor(run=self._run, body=sums, values=values, tensors=headers_of(tensors))
        self._sender.put(message, list(tensors.values()))
        self._sender.flush()  # the sums' memory is used again
        self.site.clear()


def first_message(connection: OpenConnection[MessageSender], kind: type[First], what: str) -> First | None:
    """Wait for what is to be trained; None when the run is over before it began. PeerError for another message."""
    while True:
        message, _ = connection.next()
        if isinstance(message, kind):
            return message
        if isinstance(message, ToExecutor) and isinstance(message.body, Halt):
            return None
        if not isinstance(message, Heartbeat):
            raise PeerError(f"coordinator: sent {type(message).__name__}, expected {what}")


def serve(
    address: str,
    name: str,
    run: str,
    prepare: Callable[[], ClientTrainer],
    timeout_s: float,
    clients_per_vmap: int,
    shared: SharedMemory | None = None,
) -> None:
    """Join the coordinator at HOST:PORT, train until halted. The coordinator receives an error before it is raised."""
    sys.setswitchinterval(SWITCH_S)
    host, _, port = address.rpartition(":")
    channel = dial(host, int(port), "coordinator", timeout_s)

    def act(connection: OpenConnection[MessageSender]) -> None:
        site = prepare()
        connection.sender.put(FromExecutor(run=run, body=ExecutorJoined()))
        Executor(site, connection, clients_per_vmap, shared).run()

    join = JoinRun(run=run, device=name, host="", port=0)
    take_part(CoordinatorConnection(lambda: direct(channel), lambda: join, run=run, timeout_s=timeout_s), act)


def take_part(
    connection: CoordinatorConnection[MessageSender], act: Callable[[OpenConnection[MessageSender]], None]
) -> None:
    """Act over one connection after another. An error is reported to the coordinator, then raised."""

    def reported(opened: OpenConnection[MessageSender]) -> None:
        with reporting(lambda failed: opened.sender.put(FromExecutor(run=opened.run, body=failed))):
            act(opened)

    connection.serve(reported)


def serve_executor(coordinator: tuple[str, int], site: Endpoint, run: str, timeout_s: float) -> None:
    """Train clients until the coordinator ends the run, or stays away. UserError for a job or data that it may not
    name, or that are others here; the coordinator gets it too."""
    keep_freed_pages(ANY_SIZE, arenas=1)
    sys.setswitchinterval(SWITCH_S)
    connection = CoordinatorConnection(
        lambda: direct(dial(*coordinator, "coordinator", timeout_s, identity=site.identity)),
        lambda: JoinRun(run=run, device=site.device, host="", port=0),
        run=run,
        timeout_s=timeout_s,
        retry=Retry(away_s=AWAY_TIMEOUTS * timeout_s),
        on_lost=_lost,
    )
    take_part(connection, partial(_take_part, site))


def _lost(outage: Outage) -> None:
    if outage.log:
        print(f"{outage.error}; trying again", file=sys.stderr, flush=True)


def _take_part(site: Endpoint, connection: OpenConnection[MessageSender]) -> None:
    """One connection, until it ends or the run does."""
    if (order := first_message(connection, TrainClients, "a job")) is None:
        return
    with _allowed(_job(order), site) as job:
        torch.set_num_threads(job.runtime.threads)
        files: list[RemoteFiles] = []

        def states(form: StateForm) -> StateStore:
            files.append(remote := RemoteFiles(form, connection))
            return StateStore(Path("states"), form, files=remote, unused=remote.unused())

        trainer = remote_trainer(job, order.fingerprint, 0, states, None)
        connection.sender.put(FromExecutor(run=connection.run, body=ExecutorJoined()))
        FleetExecutor(trainer, connection, job.runtime.clients_per_vmap, files).run()


def _job(order: TrainClients) -> FederatedJob:
    try:
        return msgspec.json.decode(order.job, type=FederatedJob)
    except (msgspec.DecodeError, UserError) as e:
        raise PeerError(f"coordinator: sent a job that is none: {e}") from None


@contextlib.contextmanager
def _allowed(job: FederatedJob, site: Endpoint) -> Generator[FederatedJob]:
    """The job as it is trained here. UserError for what this device's owner does not allow."""
    check_device(site)
    if job.data is None:
        raise PeerError("coordinator: sent a job without data")
    if foreign := site.data_key != ONE_OWNER:
        check_code(job)
    with allowed(job.data, site.data_kinds, foreign=foreign) as data:
        data = msgspec.structs.replace(data, folder="")
        runtime = msgspec.structs.replace(job.runtime, device=site.accelerator)
        yield msgspec.structs.replace(job, data=data, runtime=runtime)


def check_device(site: Endpoint) -> None:
    """UserError for a device that trains no clients."""
    if site.island is not None or site.engine != "torch":
        got = f"{site.ranks} ranks" if site.island is not None else f"engine {site.engine!r}"
        raise refused("several ranks, JAX", "joined executors", got)


def check_code(job: FederatedJob) -> None:
    """UserError for code, or weights in files, that somebody else's job names."""
    if not is_built_in(job.model) and (":" in job.model.name or job.model.name not in model_names()):
        raise UserError(
            f"model.name: got {job.model.name!r}, expected a model that is installed here: nothing else is imported "
            "for somebody else (if all is yours: isthmus join --one-owner)"
        )
    if job.model.name == "hf":
        raise UserError("model.name: got 'hf', expected no weights in files: nothing is read for somebody else")
    if ":" in job.federated.algorithm:
        raise UserError(
            f"federated.algorithm: got {job.federated.algorithm!r}, expected one that is installed here: nothing else "
            "is imported for somebody else (if all is yours: isthmus join --one-owner)"
        )


class FleetExecutor(Executor):
    """Its states come over the connection, so the thread that receives trains no client."""

    def __init__(
        self,
        site: ClientTrainer,
        connection: OpenConnection[MessageSender],
        clients_per_vmap: int,
        files: Sequence[RemoteFiles],
    ) -> None:
        """`files`, if there are any, get what the coordinator sends of states."""
        super().__init__(site, connection, clients_per_vmap)
        self._files = files

    def _act(self, brief: bool) -> None:
        super()._act(brief=False)

    def states_came(self, answer: StatesFound | StateFileGiven, tensors: Sequence[Tensor]) -> None:
        for files in self._files:
            files.answers.put((answer, tensors))
