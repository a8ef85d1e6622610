"""Clients' states of a run over a fleet: the coordinator keeps them, devices read and write them over their connection.

So a device that is lost takes no state with it, and what a device writes is on disk before its sums are counted: the
connection keeps the order.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.federated.state_files import StateFiles
from isthmus.federated.state_form import StateForm
from isthmus.runtime.messages.federated import (
    FromExecutor,
    StateFileGiven,
    StateFileWanted,
    StateReport,
    StatesFound,
    StatesWanted,
)
from isthmus.runtime.transport.message_sender import MessageSender, headers_of
from isthmus.runtime.transport.reconnection import OpenConnection

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
