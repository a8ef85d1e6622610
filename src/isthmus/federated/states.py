"""What clients keep between rounds: places on disk, each for one state as a safetensors file would hold it.

    states/000/1f.safetensors    place 31, a large state: a file of its own
    states/000/02.states         places 2 x 16,384 to 3 x 16,384 - 1, of states of up to 4 kB each

Where a client's state lies is the coordinator's to know: a number per client, part of what a commit saves. So nothing
is looked for, an aborted round leaves nothing that anybody would read, and what the round before left stays as it is
until the round that replaced it is on disk. Then its place is written over: the disk holds little more than a state per
client, and pages that the kernel has already. Every state says whose it is and of which round.

Files are shared, places are not: each executor fills files of its own, and places that were freed to it. (Rejected: a
file per state, which takes four times as long to write as a small state; a log that is compacted.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from isthmus.errors import UserError
from isthmus.federated.state_form import StateForm

LARGE_BYTES = 1 << 20
"""From here on a state has a file of its own, which is mapped when it is read."""
FILE_BYTES = 64 << 20
"""Smaller ones share files of this size."""
PAGE_BYTES = 4096
"""A place begins and ends with a page, so that the kernel never has to read what is written over."""
MOST_FILES = 64
"""Open at a time."""
MOST_WAITING = 64
"""Small states that are written at once."""
MOST_PIECES = 1024
"""Of memory that the kernel takes in one call."""
MOST_PLACES = 2**31
Rows = Mapping[str, Tensor]
"""States of several clients: a first dim of them before each tensor's own."""


class States(Protocol):
    """Where a worksite keeps its clients' states."""

    def expect(self, places: Sequence[int]) -> None:
        """These are read next, in this order. Nothing happens on errors: `read` will tell."""
        ...

    def read(self, clients: Sequence[int], places: Sequence[int]) -> dict[str, Tensor]:
        """The clients' states, stacked. UserError for one that is not there or not whole."""
        ...

    def write(self, clients: Sequence[int], round_: int, states: Rows) -> list[int]:
        """Keep the clients' new states, stacked; returns their places. UserError for what is no state of the form that
        `init_client` gave, or a full disk."""
        ...

    def flush(self) -> None:
        """Other executors can read from now on what was written. UserError for a full disk."""
        ...

    def free(self, places: Iterable[int]) -> None:
        """Nobody will read these any more. To be called for every turn: it may be another executor that frees one."""
        ...


class StateStore:
    """The states under one folder, for one of several executors that share it."""

    def __init__(
        self,
        folder: Path,
        form: StateForm,
        taken: Sequence[int] | NDArray[np.int32] = (),
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """`taken` are the places that a resumed run needs (-1 among them is none); `part` is (which of the executors,
        of how many)."""
        self._folder = str(folder)
        self._form = form
        self._large = form.size_bytes >= LARGE_BYTES
        self._each = form.size_bytes if self._large else -(-form.size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._per_file = 1 if self._large else FILE_BYTES // self._each
        self._filling = bytes(self._each - form.size_bytes)
        self._free: list[int] = []
        self._fresh = self._unused(np.asarray(taken, dtype=np.int64), *part)
        self._files: dict[int, int] = {}
        self._waiting: dict[int, tuple[bytes | memoryview, ...]] = {}
        """Written, but not yet where others can read."""
        self._ahead: dict[int, NDArray[np.uint8]] = {}
        """Read before they are asked for."""

    def _unused(self, taken: NDArray[np.int64], part: int, parts: int) -> Iterator[int]:
        """In this executor's files, ascending."""
        needed = np.zeros(int(taken.max()) + 1 if len(taken) else 0, dtype=np.bool_)
        needed[taken[taken >= 0]] = True
        for file in range(part, MOST_PLACES // self._per_file, parts):
            for place in range(file * self._per_file, (file + 1) * self._per_file):
                if place >= len(needed) or not needed[place]:
                    yield place

    def path(self, place: int) -> str:
        """The file that holds a place."""
        file = place // self._per_file
        return f"{self._folder}/{file >> 8:03x}/{file & 255:02x}.{'safetensors' if self._large else 'states'}"

    def expect(self, places: Sequence[int]) -> None:
        """Large states are brought from the disk while something else is computed; of small ones many are read at
        once: to begin with it takes longer than the rest."""
        if not places or places[0] in self._ahead:
            return
        with contextlib.suppress(OSError):
            if self._large:
                os.posix_fadvise(self._file(places[0], new=False), 0, 0, os.POSIX_FADV_WILLNEED)
            else:
                self._ahead = dict(zip(places, self._fetch(places)[:, None], strict=True))

    def read(self, clients: Sequence[int], places: Sequence[int]) -> dict[str, Tensor]:
        try:
            return self._mapped(clients, places) if self._large else self._read(clients, places)
        except FileNotFoundError as e:
            raise UserError(f"state {e.filename}: missing: the folder is of another run") from None
        except OSError as e:
            raise UserError(f"states of clients {_few(clients)}: cannot be read: {e.strerror or e}") from None

    def _mapped(self, clients: Sequence[int], places: Sequence[int]) -> dict[str, Tensor]:
        found: list[dict[str, Tensor]] = []
        for client, place in zip(clients, places, strict=True):
            path = self.path(place)
            try:
                with open(path, "rb") as file:
                    self._check(client, place, file.read(len(self._form)))
                found.append(load_file(path))
            except SafetensorError as e:
                raise UserError(f"state {path}: cannot be read: {e}") from None
        if len(found) == 1:
            return {name: tensor.unsqueeze(0) for name, tensor in found[0].items()}
        return {name: torch.stack([state[name] for state in found]) for name in self._form.names}

    def _read(self, clients: Sequence[int], places: Sequence[int]) -> dict[str, Tensor]:
        memory = self._ahead.pop(places[0], None) if len(places) == 1 else None
        if memory is None:
            memory = self._fetch(places)
        for row, (client, place) in enumerate(zip(clients, places, strict=True)):
            self._check(client, place, memory[row, : len(self._form)].tobytes())
        return self._form.views(torch.from_numpy(memory))

    def _fetch(self, places: Sequence[int]) -> NDArray[np.uint8]:
        """Their bytes, uint8 [places, bytes], of fresh memory."""
        if not self._waiting.keys().isdisjoint(places):
            self.flush()
        memory = np.empty((len(places), self._each), dtype=np.uint8)
        for begin, end in self._runs(places, 1):
            wanted = memory[begin:end].data.cast("B")
            got = os.preadv(self._file(places[begin], new=False), [wanted], self._offset(places[begin]))
            memory[begin + got // self._each : end] = 0  # what is not whole is nobody's
        return memory

    def _check(self, client: int, place: int, header: bytes) -> None:
        """That a state is whose we believe: of a crashed run others may be left."""
        if not self._form.is_of(client, header):
            what = f"state {self.path(place)}: place {place} does not hold client {client}'s"
            raise UserError(f"{what}: the folder is of another run, or damaged")

    def write(self, clients: Sequence[int], round_: int, states: Rows) -> list[int]:
        parts = self._form.bytes_of(clients, states)
        places = self._take(len(clients))
        for row, (client, place) in enumerate(zip(clients, places, strict=True)):
            pieces = (self._form.header(client, round_), *(part[row].data for part in parts), self._filling)
            self._waiting[place] = pieces if self._large else (b"".join(pieces),)
        if self._large or len(self._waiting) >= MOST_WAITING:
            self.flush()
        return places

    def flush(self) -> None:
        """Small states wait for each other: by itself each would take as long as ten do together."""
        places = sorted(self._waiting)
        try:
            for begin, end in self._runs(places, len(self._form.names) + 2):
                pieces = [piece for place in places[begin:end] for piece in self._waiting[place]]
                self._put(places[begin], pieces, (end - begin) * self._each)
        except OSError as e:
            raise UserError(f"states under {self._folder}: cannot be written: {e.strerror or e}") from None
        self._waiting.clear()

    def _take(self, count: int) -> list[int]:
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        return again + [next(self._fresh) for _ in range(count - len(again))]

    def _runs(self, places: Sequence[int], pieces: int) -> Iterator[tuple[int, int]]:
        """Parts of `places` that follow one another in a file, few enough for one call with so many pieces each."""
        begin, most = 0, max(1, MOST_PIECES // pieces)
        for end in range(1, len(places) + 1):
            last = end == len(places) or places[end] != places[end - 1] + 1 or not places[end] % self._per_file
            if last or end - begin == most:
                yield begin, end
                begin = end

    def _put(self, place: int, pieces: Sequence[bytes | memoryview], size_bytes: int) -> None:
        file, at = self._file(place, new=True), self._offset(place)
        written = os.pwritev(file, pieces, at)
        if written < size_bytes:  # more than the kernel takes at once, or a full disk, which the next call finds
            left = memoryview(b"".join(bytes(piece) for piece in pieces))[written:]
            while left:
                at += written
                written = os.pwrite(file, left, at)
                left = left[written:]

    def _offset(self, place: int) -> int:
        return place % self._per_file * self._each

    def _file(self, place: int, *, new: bool) -> int:
        """Open files are kept: to open one takes longer than to read a small state."""
        number = place // self._per_file
        if (file := self._files.get(number)) is None:
            if len(self._files) == MOST_FILES:
                self.close()
            path = self.path(place)
            if new:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            file = self._files[number] = os.open(path, os.O_RDWR | (os.O_CREAT if new else 0), 0o644)
            if new and self._large:
                os.ftruncate(file, self._each)  # what lay there before may have been longer
        return file

    def free(self, places: Iterable[int]) -> None:
        self._ahead.clear()  # who freed a place fills it, maybe elsewhere
        self._free = sorted([*self._free, *places], reverse=True)

    def close(self) -> None:
        """Files are opened again when they are needed."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _few(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients[:4])) + (" ..." if len(clients) > 4 else "")
