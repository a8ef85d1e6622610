"""States of clients between rounds: places on disk, each for one state as a safetensors file would hold it.

    states/000/02.states         of states of up to 4 kB: places 2 x 16,384 to 3 x 16,384 - 1

Where a client's state lies is the coordinator's to know: a number per client, part of what a commit saves. So nothing
is looked for, an aborted round leaves nothing that anybody would read, and what the round before left stays as it is
until the round that replaced it is on disk. Then its place is written over: the disk holds little more than a state per
client. Every state says whose it is and of which round, with a digest over that and its bytes.

Files are shared, places are not: each executor fills files of its own, and places that were freed to it. (Rejected: a
file per state, which takes four times as long to write as a small state; a log that is compacted.)

Small states are read and written many at once. Large ones are, in a thread, while clients train: the next one's is read
and the last one's written.

The form of a client's state, in memory and on disk: the names, types and shapes that `init_client` gives.

All clients' states have one form, so a place on disk has a size, and states of many clients are read and written as
one.

Large states go past the kernel's cache. What the cache is given for them is new memory, client after client, and new
pages cost ten times what is written to them; so the cost would be the processor's, while the device is idle.

The states that a committed round needs are packed into one file beside it: with both a run goes on on another machine.

    rounds/round-000010.safetensors   rounds/round-000010.states

It has them in the order of their places, as they lie on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.errors import IsthmusError, UserError
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


_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CLIENT, _ROUND, _SHA256 = b"0" * 12, b"0" * 9, b"0" * 64
"""Room for these in a header: with it, headers of a form are of one length."""


class _Part(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int  # in bytes, from the beginning of the state's own

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class StateForm:
    """Names, shapes and types of a state such as `like`; `len` is the size of its header in bytes. Raises UserError for
    tensors that a file cannot hold.

    A state is laid out as a safetensors file, with the client, the round and a digest in its metadata.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._parts: dict[str, _Part] = {}
        at, entries = 0, dict[str, dict[str, object]]()
        # Of wide types first: numbers lie where the processor wants them.
        for name, value in sorted(like.items(), key=lambda entry: -_checked(entry[0], entry[1]).dtype.itemsize):
            part = self._parts[name] = _Part(value.dtype, tuple(value.shape), at)
            offsets = [at, at + part.size_bytes]
            entries[name] = {"dtype": _DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": offsets}
            at += part.size_bytes
        metadata = {"client": _CLIENT.decode(), "round": _ROUND.decode(), "sha256": _SHA256.decode()}
        text = msgspec.json.encode({"__metadata__": metadata, **entries})
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        client = header.index(_CLIENT)
        round_ = header.index(_ROUND, client + len(_CLIENT))
        self._digest_at = header.index(_SHA256, round_ + len(_ROUND))
        self._lead = header[:client]
        self._between = header[client + len(_CLIENT) : round_]
        self._before_digest = header[round_ + len(_ROUND) : self._digest_at]
        self._tail = header[self._digest_at + len(_SHA256) :]
        self._length = len(header)
        self.size_bytes = self._length + at  # bytes of a whole state on disk

    def __len__(self) -> int:
        return self._length

    @property
    def names(self) -> Sequence[str]:
        return list(self._parts)

    def _opening(self, client: int, round_: int) -> bytes:
        """A header up to its digest."""
        return b"%b%012d%b%09d%b" % (self._lead, client, self._between, round_, self._before_digest)

    def _digest(self, opening: bytes, state: NDArray[np.uint8]) -> bytes:
        """Over who it is of, and the tensors."""
        digest = hashlib.sha256(opening)
        digest.update(state[self._length : self.size_bytes].data)
        return digest.hexdigest().encode()

    def is_of(self, client: int, state: NDArray[np.uint8], round_: int | None = None) -> bool:
        """Return whether a state, uint8 [bytes], is of this form and client, and of a round where one is given."""
        header = state[: self._length].tobytes()
        begin = len(self._lead) + len(_CLIENT) + len(self._between)
        digits = header[begin : begin + len(_ROUND)]
        if not digits.isdigit() or (round_ is not None and int(digits) != round_):
            return False
        opening = self._opening(client, int(digits))
        return header.startswith(opening) and header.endswith(self._tail)

    def is_whole(self, state: NDArray[np.uint8]) -> bool:
        """Return whether every byte of a state, uint8 [bytes], is as it was signed."""
        opening, digest = state[: self._digest_at].tobytes(), self._digest_at + len(_SHA256)
        return state[self._digest_at : digest].tobytes() == self._digest(opening, state)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors [states, ...] in the memory of states, uint8 [states, bytes]."""
        found: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            begin = self._length + part.at
            numbers = memory[:, begin : begin + part.size_bytes].view(part.dtype)
            found[name] = numbers.view(len(memory), *part.shape)
        return found

    def fill(
        self, views: Mapping[str, Tensor], rows: slice, clients: Sequence[int], states: Mapping[str, Tensor]
    ) -> None:
        """Copy the clients' states, stacked, to rows of a memory whose tensors are `views`. UserError for states of
        another form."""
        if states.keys() != self._parts.keys():
            raise self._other(clients[0], states)
        for name, part in self._parts.items():
            value, shape = states[name], (len(clients), *part.shape)
            if not isinstance(value, Tensor) or value.dtype != part.dtype or value.shape != shape:  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
                raise self._other(clients[0], states)
            if value.layout is not torch.strided:
                text = f"state {name!r} of client {clients[0]}"
                raise UserError(f"algorithm: {text}: got {value.layout}, expected strided")
            views[name][rows].copy_(value.detach())

    def sign(self, memory: NDArray[np.uint8], clients: Sequence[int], round_: int) -> None:
        """Make whole states on disk of the tensors in memory, uint8 [states, bytes]."""
        memory[:, self.size_bytes :] = 0
        for client, state in zip(clients, memory, strict=True):
            opening = self._opening(client, round_)
            header = opening + self._digest(opening, state) + self._tail
            state[: self._length] = np.frombuffer(header, dtype=np.uint8)

    def _other(self, client: int, states: Mapping[str, Tensor]) -> UserError:
        for name, value in states.items():
            if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
                what = f"state {name!r} of client {client}: got {type(value).__name__}"
                return UserError(f"algorithm: {what}, expected a tensor")
        got = {name: _Part(value.dtype, tuple(value.shape[1:]), 0) for name, value in states.items()}
        text, expected = (
            ", ".join(f"{name} {part}" for name, part in sorted(parts.items())) or "nothing"
            for parts in (got, self._parts)
        )
        what = f"state of client {client}: got {text}, expected {expected}, as init_client gives"
        return UserError(f"algorithm: {what}")


def _checked(name: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
        raise UserError(f"algorithm: init_client's {name!r}: got {type(value).__name__}, expected a tensor")
    if value.dtype not in _DTYPES:
        raise UserError(f"algorithm: init_client's {name!r}: got {value.dtype}, expected plain numbers")
    if value.layout is not torch.strided:
        raise UserError(f"algorithm: init_client's {name!r}: got {value.layout}, expected strided")
    return value


LARGE_BYTES = 1 << 20  # from here on the device takes longer than to ask it
LARGE_AHEAD = 2  # that of the client in work, and the next
MOST_WAITING = 64  # small states that are written at once
WAITING_BYTES = 1 << 20  # they take no more memory than that, or one's
Rows = Mapping[str, Tensor]  # states of several clients: a first dim of them before each tensor's own
_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


class StateLost(UserError):
    """A state that was kept is not there, or not as it was written."""

    def __init__(self, clients: Collection[int], reason: str) -> None:
        super().__init__(reason)
        self.clients = frozenset(clients)  # whose states are lost

    def refusal(self) -> IsthmusError:
        """Return the error of an algorithm whose clients cannot begin anew."""
        return UserError(f"{self}; the algorithm cannot go on without it")


class States(Protocol):
    """Where a client trainer keeps its clients' states."""

    def expect(self, places: Iterable[int]) -> None:
        """These are read next, in this order. Nothing happens on errors: `read` will tell."""

    def read(self, clients: Sequence[int], places: Sequence[int]) -> dict[str, Tensor]:
        """The clients' states, stacked. StateLost for one that is not there or not whole."""
        ...

    def write(self, clients: Sequence[int], round_: int, states: Rows) -> list[int]:
        """Keep the clients' new states, stacked; returns their places. UserError for what is no state of the form that
        `init_client` gave, or a full disk."""
        ...

    def flush(self) -> None:
        """Other executors can read from now on what was written. UserError for a full disk."""

    def free(self, places: Iterable[int]) -> None:
        """Nobody will read these any more. To be called for every phase: it may be another executor that frees one."""


class _Batch(NamedTuple):
    memory: NDArray[np.uint8]  # [states, bytes], as on disk
    views: Rows  # the tensors in it
    whole: Sequence[bool] = ()  # whether the digest of each state that was read is right


class StateStore:
    """The states under one folder, for one of several executors that share it."""

    def __init__(
        self,
        folder: Path,
        form: StateForm,
        taken: Sequence[int] | NDArray[np.int32] = (),
        part: tuple[int, int] = (0, 1),
        files: StateFiles | None = None,
        unused: Iterator[int] | None = None,
    ) -> None:
        """`taken` are the places that a resumed run needs (-1 among them is none); `part` is (which of the executors,
        of how many); `files`, in place of those under the folder alone; `unused`, in place of places by both."""
        self._folder = str(folder)
        self._form = form
        self._large = form.size_bytes >= LARGE_BYTES
        self._files = files or StateFiles(self._folder, form.size_bytes, direct=self._large)
        self._rows = max(1, min(MOST_WAITING, WAITING_BYTES // self._files.each_bytes))
        self._free: list[int] = []
        self._fresh = unused or self._unused(np.asarray(taken, dtype=np.int64), *part)
        self._disk: Executor = ThreadPoolExecutor(1, "states") if self._large else _AtOnce()
        """Does one thing after the other."""
        self._batch: _Batch | None = None
        self._waiting: list[int] = []  # the places of the batch's first states, which are to be written
        self._owners: list[int] = []  # their clients
        self._round = 0  # the round of all states that wait
        self._writing: Future[None] | None = None
        self._ahead: dict[int, tuple[Future[_Batch], int]] = {}
        """Read before they are asked for: where, and the row there."""
        self._several = False
        """The last ones that were read were asked for together: what comes next cannot be distinguished from tasks."""

    def _unused(self, taken: NDArray[np.int64], part: int, parts: int) -> Iterator[int]:
        """In this executor's files, ascending."""
        needed = np.zeros(int(taken.max()) + 1 if len(taken) else 0, dtype=np.bool_)
        needed[taken[taken >= 0]] = True
        per_file = self._files.per_file
        for file in range(part, MOST_PLACES // per_file, parts):
            for place in range(file * per_file, (file + 1) * per_file):
                if place >= len(needed) or not needed[place]:
                    yield place

    def path(self, place: int) -> str:
        return self._files.path(place)

    def expect(self, places: Iterable[int]) -> None:
        if self._several:
            return
        if self._large:
            for place in islice(places, LARGE_AHEAD):
                if place not in self._ahead:
                    self._ahead[place] = self._fetch([place]), 0
        elif (first := next(rest := iter(places), None)) is not None and first not in self._ahead:
            wanted = [first, *rest]
            fetched = self._fetch(wanted)
            self._ahead = {place: (fetched, row) for row, place in enumerate(wanted)}

    def read(self, clients: Sequence[int], places: Sequence[int]) -> dict[str, Tensor]:
        self._several = len(places) > 1
        try:
            (memory, views, whole), begin = self._fetched(places)
        except FileNotFoundError as e:
            gone = [client for client, place in zip(clients, places, strict=True) if self.path(place) == e.filename]
            raise StateLost(gone or clients, f"state {e.filename}: missing: the folder is of another run") from None
        except OSError as e:
            what = f"states of clients {_few(clients)}: cannot be read: {e.strerror or e}"
            raise StateLost(clients, what) from None
        for row, (client, place) in enumerate(zip(clients, places, strict=True), begin):
            what = f"state {self.path(place)}: place {place}"
            # Of a crashed run others may be left.
            if not self._form.is_of(client, memory[row]):
                reason = f"{what} does not hold client {client}'s: the folder is of another run, or damaged"
                raise StateLost([client], reason)
            if not whole[row]:
                raise StateLost([client], f"{what}, client {client}'s, is not as it was written: damaged since")
        return {name: view[begin : begin + len(places)] for name, view in views.items()}

    def _fetched(self, places: Sequence[int]) -> tuple[_Batch, int]:
        """These states, from which row on."""
        if len(places) == 1 and (ahead := self._ahead.pop(places[0], None)) is not None:
            with contextlib.suppress(OSError):  # it may be of another state that was read with it
                return ahead[0].result(), ahead[1]
        return self._fetch(places).result(), 0

    def _fetch(self, places: Sequence[int]) -> Future[_Batch]:
        """They are not written over until they are read: that is done in order."""
        if not set(places).isdisjoint(self._waiting):
            self._send()
        batch = self._room(len(places))

        def fetched() -> _Batch:
            self._files.read(places, batch.memory)
            return batch._replace(whole=[self._form.is_whole(state) for state in batch.memory])

        return self._disk.submit(fetched)

    def write(self, clients: Sequence[int], round_: int, states: Rows) -> list[int]:
        begin = len(self._waiting)
        if self._batch is not None and (begin + len(clients) > len(self._batch.memory) or round_ != self._round):
            self._send()
            begin = 0
        if self._batch is None:
            self._settle()  # its memory is used again
            self._batch = self._room(max(self._rows, len(clients)))
        self._form.fill(self._batch.views, slice(begin, begin + len(clients)), clients, states)
        places = self._take(len(clients))
        self._waiting += places
        self._owners += clients
        self._round = round_
        if len(self._waiting) == len(self._batch.memory):
            self._send()
        return places

    def _send(self) -> None:
        """Write the states that wait, now or soon."""
        if self._batch is None or not self._waiting:
            return
        self._settle()
        memory = self._batch.memory[: len(self._waiting)]
        places, owners, round_ = self._waiting, self._owners, self._round

        def written() -> None:
            self._form.sign(memory, owners, round_)
            self._files.write(places, memory)

        self._writing = self._disk.submit(written)
        self._batch, self._waiting, self._owners = None, [], []

    def _settle(self) -> None:
        """Until what was sent is written."""
        if self._writing is not None:
            try:
                self._writing.result()
            except OSError as e:
                raise UserError(f"states under {self._folder}: cannot be written: {e.strerror or e}") from None
            finally:
                self._writing = None

    def flush(self) -> None:
        self._send()
        self._settle()

    def _room(self, states: int) -> _Batch:
        memory = self._files.accumulator(states)
        return _Batch(memory, self._form.views(torch.from_numpy(memory)))

    def _take(self, count: int) -> list[int]:
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        return again + [next(self._fresh) for _ in range(count - len(again))]

    def free(self, places: Iterable[int]) -> None:
        self._ahead.clear()  # who freed a place fills it, maybe elsewhere
        self._free = sorted([*self._free, *places], reverse=True)


class _AtOnce(Executor):
    """In place of a thread, for what is over sooner than another could begin."""

    def submit(self, fn: Callable[_Given, _Found], /, *args: _Given.args, **kwargs: _Given.kwargs) -> Future[_Found]:
        done: Future[_Found] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except OSError as e:  # is raised to who asks for the result
            done.set_exception(e)
        return done


def _few(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients[:4])) + (" ..." if len(clients) > 4 else "")
