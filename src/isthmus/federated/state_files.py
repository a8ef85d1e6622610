"""Places on disk for clients' states, many in a file: which file has one, and bytes to and from it.

Large states go past the kernel's cache. What the cache is given for them is new memory, client after client, and new
pages cost ten times what is written to them; so the cost would be the processor's, while the device is idle.

Clients' states that a committed round needs, in one file beside it: with both a run goes on on another machine.

    rounds/round-000010.safetensors   rounds/round-000010.states

States lie in places that are written over. The file has them in the order of their places, as they lie on disk: each
says whose it is, with a digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from isthmus.errors import UserError
from isthmus.federated.server import STATES
from isthmus.run_files import PACKED

PAGE_BYTES = 4096
"""A place begins and ends with a page: the kernel need not read what is written over, and can leave out its cache."""
FILE_BYTES = 64 << 20  # bytes of a file, where more than one place fits
MOST_FILES = 64  # open at a time
MOST_PLACES = 2**31
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not every system has it


class StateFiles:
    """Under one folder, for states of up to `size_bytes`. One thread. OSError where the system fails."""

    def __init__(self, folder: str, size_bytes: int, *, direct: bool) -> None:
        self.each_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self.per_file = max(1, FILE_BYTES // self.each_bytes)
        self._folder = folder
        self._flags = os.O_RDWR | (_DIRECT if direct else 0)
        self._open: dict[int, int] = {}

    def path(self, place: int) -> str:
        file = place // self.per_file
        return f"{self._folder}/{file >> 8:03x}/{file & 255:02x}.states"

    def accumulator(self, places: int) -> NDArray[np.uint8]:
        """Memory that `read` and `write` take, uint8 [places, bytes]."""
        size_bytes = places * self.each_bytes
        memory = np.empty(size_bytes + PAGE_BYTES, dtype=np.uint8)
        begin = -memory.ctypes.data % PAGE_BYTES
        return memory[begin : begin + size_bytes].reshape(places, self.each_bytes)

    def read(self, places: Sequence[int], memory: NDArray[np.uint8]) -> None:
        """Read the places; a missing or torn one becomes zeros."""
        for begin, end in self._runs(places):
            wanted = memory[begin:end].reshape(-1).data
            file, at, got = self._file(places[begin], new=False), self._offset(places[begin]), 0
            while got < len(wanted) and (some := os.preadv(file, [wanted[got:]], at + got)):
                got += some
            memory[begin + got // self.each_bytes : end] = 0

    def write(self, places: Sequence[int], memory: NDArray[np.uint8]) -> None:
        """The first rows of `memory`, one for each place."""
        for begin, end in self._runs(places):
            left, at = memory[begin:end].reshape(-1).data, self._offset(places[begin])
            file = self._file(places[begin], new=True)
            while left:  # more than the kernel takes at once, or a full disk, which the next call finds
                written = os.pwrite(file, left, at)
                left, at = left[written:], at + written

    def _runs(self, places: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Parts of `places` that follow one another in a file."""
        begin = 0
        for end in range(1, len(places) + 1):
            if end == len(places) or places[end] != places[end - 1] + 1 or not places[end] % self.per_file:
                yield begin, end
                begin = end

    def _offset(self, place: int) -> int:
        return place % self.per_file * self.each_bytes

    def _file(self, place: int, *, new: bool) -> int:
        """Open files are kept: to open one takes longer than to read a small state."""
        number = place // self.per_file
        if (file := self._open.get(number)) is None:
            if len(self._open) == MOST_FILES:
                self._close()
            path = self.path(place)
            if new:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            file = self._open[number] = self._opened(path, os.O_CREAT if new else 0)
        return file

    def _opened(self, path: str, create: int) -> int:
        try:
            return os.open(path, self._flags | create, 0o644)
        except OSError as e:
            if not self._flags & _DIRECT or isinstance(e, FileNotFoundError):
                raise
            self._flags &= ~_DIRECT  # some file systems have nothing but the cache
            return os.open(path, self._flags | create, 0o644)

    def _close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self._close()


AT_ONCE_BYTES = 16 << 20


def packed_beside(round_file: Path) -> Path:
    return round_file.with_suffix(PACKED)


def pack_states(round_file: Path, folder: Path, size_bytes: int, target: Path) -> None:
    """Write the states that a committed round needs; `folder` has those of the run, of up to `size_bytes`. OSError,
    also where one is missing."""
    with safe_open(round_file, framework="np") as file:
        places = _needed(file.get_tensor(STATES))
    files = StateFiles(str(folder), size_bytes, direct=False)
    with target.open("wb") as packed:
        for some in _parts(places, files.each_bytes):
            memory = files.accumulator(len(some))
            files.read(some, memory)
            packed.write(memory.data)


def unpack_states(round_file: Path, folder: Path, size_bytes: int, states: NDArray[np.int32]) -> None:
    """Put the states of a round that came from elsewhere where they lie, and remove their file; nothing where there is
    none. UserError for a file that is not whole, a full disk."""
    packed, places = packed_beside(round_file), _needed(states)
    if not packed.is_file():
        return
    files = StateFiles(str(folder), size_bytes, direct=False)
    try:
        if (got := packed.stat().st_size) != (expected := len(places) * files.each_bytes):
            raise UserError(f"{packed}: got {got} bytes of clients' states, expected {expected}")
        with packed.open("rb") as file:
            for some in _parts(places, files.each_bytes):
                memory = files.accumulator(len(some))
                file.readinto(memory.reshape(-1).data)
                files.write(some, memory)
        packed.unlink()
    except OSError as e:
        raise UserError(f"{packed}: clients' states cannot be read or written: {e.strerror or e}") from None


def needs_states(round_file: Path) -> bool:
    """Return whether a committed round is one of clients that keep something; False for a damaged one."""
    try:
        with safe_open(round_file, framework="np") as file:
            return STATES in file.keys()  # noqa: SIM118  not a dict
    except (OSError, SafetensorError):
        return False


def _needed(states: NDArray[np.int32]) -> list[int]:
    return sorted(states[states >= 0].tolist())


def _parts(places: list[int], each_bytes: int) -> list[list[int]]:
    """Not more at a time than memory should hold."""
    count = max(1, AT_ONCE_BYTES // each_bytes)
    return [places[begin : begin + count] for begin in range(0, len(places), count)]
