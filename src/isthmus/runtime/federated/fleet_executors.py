"""A run's executors are devices that joined a fleet: each that is there trains clients, each that comes is called.

Clients' states of a run over a fleet: the coordinator keeps them, devices read and write them over their connection.

So a device that is lost takes no state with it, and what a device writes is on disk before its sums are counted: the
connection keeps the order.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.combinations import refused
from isthmus.errors import PeerError, UserError
from isthmus.federated.job import FederatedJob
from isthmus.federated.server import Server
from isthmus.federated.state_files import StateFiles
from isthmus.federated.states import StateForm
from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.federated.update_receiver import SumsReceiver
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import (
    FromExecutor,
    StateFileGiven,
    StateFileWanted,
    StateReport,
    StatesFound,
    StatesWanted,
    ToExecutor,
    TrainClients,
)
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.message_sender import MessageSender, headers_of
from isthmus.runtime.transport.reconnection import OpenConnection
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
