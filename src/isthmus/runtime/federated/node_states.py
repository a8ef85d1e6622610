"""Clients' states on several nodes: each is read where it lies, or fetched from an executor of the node that has it.

A place is filled on its own node only, so that its number says where it is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.federated.state_files import StateFiles
from isthmus.federated.state_form import StateForm
from isthmus.federated.states import LARGE_BYTES
from isthmus.protocol.state_homes import StateHomes

Rows = NDArray[np.uint8]  # states [places, bytes], as on disk
Fetch = Callable[[int, Sequence[int]], Rows | None]
"""(node, places) -> their states; None where no executor of the node is left."""
GiveBack = Callable[[int, Sequence[int]], None]  # (node, places): they are free, for an executor of the node to fill
MARKER = ".executor-"


class NodeFiles(StateFiles):
    """The files of an executor on one of several nodes. One thread, but for `take_back`."""

    def __init__(
        self, folder: Path, form: StateForm, homes: StateHomes, node: int, *, fetch: Fetch, give_back: GiveBack
    ) -> None:
        """`folder` is the node's own."""
        super().__init__(str(folder), form.size_bytes, direct=form.size_bytes >= LARGE_BYTES)
        self.moved_bytes = 0
        """Bytes of states that came from other nodes."""
        self._homes = homes
        self._node = node
        self._fetch = fetch
        self._give_back = give_back
        self._returned: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read(self, places: Sequence[int], memory: Rows) -> None:
        """Read states into `memory`. FileNotFoundError for a state of a lost node, whose files are lost with it, unless
        this node sees them too."""
        found = self._by_node(places)
        if found.keys() <= {self._node}:
            super().read(places, memory)
            return
        for node, rows in found.items():
            wanted = [places[row] for row in rows]
            fetched = None if node == self._node else self._fetch(node, wanted)
            if fetched is None:
                fetched = self.accumulator(len(wanted))
                super().read(wanted, fetched)
            else:
                self.moved_bytes += fetched.nbytes
            memory[rows] = fetched

    def to_fill(self, places: Iterable[int]) -> Iterable[int]:
        own: list[int] = []
        freed = list(places)
        for node, rows in self._by_node(freed).items():
            mine = [freed[row] for row in rows]
            if node == self._node:
                own += mine
            else:
                self._give_back(node, mine)
        while not self._returned.empty():
            own.append(self._returned.get())
        return own

    def take_back(self, places: Iterable[int]) -> None:
        """Places of this node that another one has freed. Any thread."""
        for place in places:
            self._returned.put(place)

    def _by_node(self, places: Sequence[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for row, place in enumerate(places):
            found.setdefault(self._homes.of_one(place), []).append(row)
        return found


class NodeView(NamedTuple):
    """An executor's view of its folder."""

    executors: tuple[str, ...]  # whose states lie in it too
    files: tuple[int, ...]  # their numbers


class NodeFolder:
    """The folder of an executor's states, for others."""

    def __init__(self, folder: Path, size_bytes: int, name: str) -> None:
        """UserError where it cannot be written. A marker says who sees the folder, until `settle`."""
        self._folder = folder
        self._files = StateFiles(str(folder), size_bytes, direct=size_bytes >= LARGE_BYTES)
        self._reading = threading.Lock()
        self._marker = folder / f"{MARKER}{name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._marker.touch()
        except OSError as e:
            raise UserError(f"states under {folder}: cannot be written: {e.strerror or e}") from None

    def executors(self) -> tuple[str, ...]:
        return tuple(path.name.removeprefix(MARKER) for path in self._folder.glob(f"{MARKER}*"))

    def files(self) -> tuple[int, ...]:
        found = self._folder.glob("*/*.states")
        return tuple((int(path.parent.name, 16) << 8) + int(path.stem, 16) for path in found)

    def settle(self) -> None:
        self._marker.unlink(missing_ok=True)

    def read(self, places: Sequence[int]) -> Rows:
        """Any thread. FileNotFoundError."""
        with self._reading:
            rows = self._files.accumulator(len(places))
            self._files.read(places, rows)
            return rows


def state_homes(names: Sequence[str], views: Sequence[NodeView], per_file: int, move_s: float) -> StateHomes | None:
    """Return the homes of states, found from each executor's view: executors that see the same folder are on one node.
    None where all are on one."""
    first = [min(names.index(name) for name in view.executors if name in names) for view in views]
    numbers = {place: number for number, place in enumerate(sorted(set(first)))}
    if len(numbers) == 1:
        return None
    nodes = tuple(numbers[place] for place in first)
    found = {file: node for node, view in zip(nodes, views, strict=True) for file in view.files}
    return StateHomes(nodes=nodes, per_file=per_file, move_s=move_s, found=found)
