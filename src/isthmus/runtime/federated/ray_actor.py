"""An executor as a Ray actor: a channel, and the executor of processes behind it. It decides nothing.

The coordinator's frames come as calls of `deliver`. The executor's frames go as what `run` yields: Ray has copied a
frame when the next one is asked for, so values are sent from where they are.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from isthmus.errors import PeerError, UserError
from isthmus.federated.admission import first_state
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.emulated_speed import Pacer
from isthmus.federated.job import FederatedJob, build, client_data, emulation
from isthmus.federated.resident import Resident
from isthmus.federated.state_form import StateForm
from isthmus.federated.states import StateStore
from isthmus.runtime.federated.executor import train_over
from isthmus.runtime.federated.ray_frames import Payload, RayFrame, frame_bytes, ray_frame, received
from isthmus.runtime.federated.trainer import executor_trainer
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.processes.memory import ANY_SIZE, keep_freed_pages
from isthmus.runtime.transport.channel import ChannelStatistics, Guard, Received
from isthmus.runtime.transport.message_sender import SWITCH_S


class ActorSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is to be."""

    job: FederatedJob
    run: str
    name: str
    number: int
    """Of the executor."""
    executors: int
    fingerprint: str
    """Of the coordinator's data."""
    folder: str
    """Where the command runs: paths in the job, and modules of the user's own, are relative to it."""
    states: str
    """The folder of clients' states."""
    taken: bytes
    """int32 numbers of the states that the last committed round needs."""


class _Outgoing(NamedTuple):
    frame: RayFrame
    taken: threading.Event


class ActorChannel:
    """A `MessageChannel` to the coordinator. Calls of an actor may come in another order than they were made in: each
    frame has a number."""

    other = "coordinator"

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[RayFrame | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._early: dict[int, RayFrame] = {}
        self._next = 0
        self._ordering = threading.Lock()
        self._closed = threading.Event()
        self._sent = self._received = 0

    def deliver(self, number: int, frame: RayFrame) -> None:
        with self._ordering:
            self._early[number] = frame
            while (following := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._incoming.put(following)

    def frames(self) -> Generator[RayFrame]:
        """What is sent, until it is closed."""
        while (one := self._outgoing.get()) is not None:
            yield one.frame
            one.taken.set()

    def send(self, message: AnyMessage, payload: Sequence[memoryview] = ()) -> int:
        if self._closed.is_set():
            raise PeerError("coordinator: the connection is closed")
        one = _Outgoing(ray_frame(message, payload), threading.Event())
        self._outgoing.put(one)
        self._sent += frame_bytes(one.frame)
        if payload:
            one.taken.wait()  # its memory is used again
        return frame_bytes(one.frame)

    def receive(self, guard: Guard | None = None, idle_s: float | None = None) -> Received | None:
        try:
            frame = self._incoming.get(timeout=idle_s)
        except queue.Empty:
            raise PeerError(f"coordinator: silent for {idle_s:g} s") from None
        if frame is None:
            return None
        self._received += frame_bytes(frame)
        return received(frame, guard)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._incoming.put(None)
            self._outgoing.put(None)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._sent, self._received)


class ExecutorActor:
    """`deliver` is called while `run` runs. Training has a thread of its own."""

    def __init__(self) -> None:
        self._channel = ActorChannel()

    def deliver(self, number: int, header: bytes, payload: Payload = ()) -> None:
        """Frame number so many of the coordinator."""
        self._channel.deliver(number, (header, payload))

    def run(self, setup: bytes) -> Generator[RayFrame]:
        """Join the run and train until halted; yields the frames to the coordinator."""
        work = msgspec.msgpack.decode(setup, type=ActorSetup)
        threading.Thread(target=self._train, args=(work,), name="train", daemon=True).start()
        yield from self._channel.frames()

    def _train(self, setup: ActorSetup) -> None:
        keep_freed_pages(ANY_SIZE, arenas=1)
        sys.setswitchinterval(SWITCH_S)
        job = setup.job
        torch.set_num_threads(job.execution.threads)
        try:
            train_over(
                self._channel,
                setup.name,
                setup.run,
                lambda: _trainer(setup),
                job.timeout_s,
                job.execution.clients_per_vmap,
            )
        except Exception:  # the coordinator knows by now
            traceback.print_exc()


def _trainer(setup: ActorSetup) -> ClientTrainer:
    """UserError where the job cannot be trained on this node."""
    _go_to(setup.folder)
    job, data = setup.job, client_data(setup.job)
    if data.fingerprint != setup.fingerprint:
        raise UserError("data: a node of the Ray cluster has other data than the coordinator, expected the same")
    algorithm, module = job.algorithm(len(data.sizes)), build(job)
    first = first_state(algorithm, Resident(module).vector())
    states = None
    if first is not None:
        taken = np.frombuffer(setup.taken, dtype=np.int32)
        states = StateStore(Path(setup.states), StateForm(first), taken, (setup.number, setup.executors))
    pacer = Pacer(emulation(job, setup.number).clock())
    return executor_trainer(job, algorithm, module, data, states, pacer, setup.number)


def _go_to(folder: str) -> None:
    with contextlib.suppress(OSError):  # a job may need nothing that is there
        os.chdir(folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
