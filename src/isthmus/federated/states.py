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
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import IsthmusError, UserError
from isthmus.federated.state_files import MOST_PLACES, StateFiles
from isthmus.federated.state_form import StateForm

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
