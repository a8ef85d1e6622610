"""An executor as a Ray actor: a channel, and the executor of processes behind it. It decides nothing.

The coordinator's frames come as calls of `deliver`, the executor's go as what `run` yields. Where clients keep states,
actors of other nodes read those of this one (`read_states`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from isthmus.errors import UserError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.emulated_speed import Pacer
from isthmus.federated.job import FederatedJob, emulation
from isthmus.federated.state_form import StateForm
from isthmus.federated.states import StateStore
from isthmus.protocol.state_homes import StateHomes
from isthmus.runtime.federated.actor_channel import ActorChannel
from isthmus.runtime.federated.executor import train_over
from isthmus.runtime.federated.node_states import Fetch, GiveBack, NodeFiles, NodeFolder, Rows
from isthmus.runtime.federated.ray_frames import Payload
from isthmus.runtime.federated.trainer import remote_trainer
from isthmus.runtime.launchers.ray_connection import ray_library
from isthmus.runtime.processes.memory import ANY_SIZE, keep_freed_pages
from isthmus.runtime.transport.message_sender import SWITCH_S

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class ActorSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an actor."""

    job: FederatedJob
    run: str
    name: str
    number: int
    fingerprint: str  # the fingerprint of the coordinator's data
    folder: str  # where the command runs: paths in the job, and modules of the user's own, are relative to it
    states: str  # the folder of clients' states, with variables of the node's environment
    taken: bytes  # int32 numbers of the states that the last committed round needs


class ExecutorActor:
    """Other methods are called while `run` runs. Training has a thread of its own."""

    def __init__(self, setup: bytes) -> None:
        self._setup = msgspec.msgpack.decode(setup, type=ActorSetup)
        self._channel = ActorChannel()
        self._folder: NodeFolder | None = None
        self._files: NodeFiles | None = None
        with contextlib.suppress(OSError):  # a job may need nothing that is there
            os.chdir(self._setup.folder)
        if self._setup.folder not in sys.path:
            sys.path.insert(0, self._setup.folder)

    def ready(self) -> None:
        """Once its process has started."""

    def open_states(self, size_bytes: int) -> None:
        """Open the folder of clients' states of this size. UserError for a folder that cannot be written."""
        self._folder = NodeFolder(self._states_folder, size_bytes, self._setup.name)

    def view_states(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The fields of a `NodeView`, once the folders of all are open."""
        assert self._folder is not None, "states are opened first"
        return self._folder.executors(), self._folder.files()

    def read_states(self, places: Sequence[int]) -> Rows:
        """Return states of this node, for another one."""
        assert self._folder is not None, "states are opened first"
        return self._folder.read(places)

    def take_back(self, places: Sequence[int]) -> None:
        """Another node has freed these places of this node."""
        if self._files is not None:
            self._files.take_back(places)

    def deliver(self, number: int, header: bytes, payload: Payload = ()) -> None:
        """Frame number so many of the coordinator."""
        self._channel.deliver(number, (header, payload))

    def run(self, homes: bytes, peers: Sequence[ActorHandle[ExecutorActor]]) -> Generator[tuple[bytes, Payload, int]]:
        """Join the run and train until halted. Yields the frames to the coordinator, each with the bytes of states that
        have come from other nodes so far. `peers` are all actors, by the executors' numbers."""
        if self._folder is not None:
            self._folder.settle()
        where = msgspec.msgpack.decode(homes, type=StateHomes | None)
        threading.Thread(target=self._train, args=(where, peers), name="train", daemon=True).start()
        for header, payload in self._channel.frames():
            yield header, payload, 0 if self._files is None else self._files.moved_bytes

    def _train(self, homes: StateHomes | None, peers: Sequence[ActorHandle[ExecutorActor]]) -> None:
        keep_freed_pages(ANY_SIZE, arenas=1)
        sys.setswitchinterval(SWITCH_S)
        setup, job = self._setup, self._setup.job
        torch.set_num_threads(job.runtime.threads)
        try:
            train_over(
                self._channel,
                setup.name,
                setup.run,
                lambda: self._trainer(homes, peers),
                job.timeout_s,
                job.runtime.clients_per_vmap,
            )
        except Exception:  # the coordinator knows by now
            traceback.print_exc()

    def _trainer(self, homes: StateHomes | None, peers: Sequence[ActorHandle[ExecutorActor]]) -> ClientTrainer:
        """UserError where the job cannot be trained on this node."""
        setup, job = self._setup, self._setup.job
        pacer = Pacer(emulation(job, setup.number).clock())
        states = lambda form: self._states(form, homes, peers)  # noqa: E731
        return remote_trainer(job, setup.fingerprint, setup.number, states, pacer)

    @property
    def _states_folder(self) -> Path:
        """UserError for a variable that this node has not."""
        folder = os.path.expandvars(self._setup.states)
        if "$" in folder:
            raise UserError(f"runtime.ray.states: got {self._setup.states!r}, a variable that a node has not set")
        return Path(folder)

    def _states(
        self, form: StateForm, homes: StateHomes | None, peers: Sequence[ActorHandle[ExecutorActor]]
    ) -> StateStore:
        number, taken = self._setup.number, np.frombuffer(self._setup.taken, dtype=np.int32)
        if homes is not None:
            taken = np.concatenate([taken, homes.left_elsewhere(number)])
            self._files = NodeFiles(
                self._states_folder,
                form,
                homes,
                homes.nodes[number],
                fetch=_fetch(homes, peers),
                give_back=_give_back(homes, peers),
            )
        return StateStore(self._states_folder, form, taken, (number, len(peers)), self._files)


def _fetch(homes: StateHomes, peers: Sequence[ActorHandle[ExecutorActor]]) -> Fetch:
    ray = ray_library()

    def fetch(node: int, places: Sequence[int]) -> Rows | None:
        for peer in _of(node, homes, peers):
            try:
                return ray.get(peer.read_states.remote(places))
            except ray.exceptions.RayTaskError:
                return None  # they are not there
            except ray.exceptions.RayActorError:
                continue
        return None

    return fetch


def _give_back(homes: StateHomes, peers: Sequence[ActorHandle[ExecutorActor]]) -> GiveBack:
    def give_back(node: int, places: Sequence[int]) -> None:
        for peer in _of(node, homes, peers)[:1]:
            peer.take_back.options(num_returns=0).remote(places)

    return give_back


def _of(
    node: int, homes: StateHomes, peers: Sequence[ActorHandle[ExecutorActor]]
) -> Sequence[ActorHandle[ExecutorActor]]:
    return [peer for peer, other in zip(peers, homes.nodes, strict=True) if other == node]
