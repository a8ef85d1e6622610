"""A stage's parts of checkpoints, which its device writes to the run's store itself, if its owner allows it.

The file has the same bytes as one that the coordinator would have written. Credentials are those of the device's own
environment. What cannot be written goes to the coordinator, with the reason. A file of which no manifest ever speaks,
as the device or the coordinator was killed, is removed with the next old checkpoint.
"""

from __future__ import annotations

import hashlib
import queue
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from isthmus.protocol.run_messages import FileTensor, Item, ItemReported, WeightFile, WrittenPart
from isthmus.run_files import checkpoint_file
from isthmus.runtime.device.own_files import is_below
from isthmus.runtime.messages.assignment import StorePlace
from isthmus.session.session import in_one_line
from isthmus.stores import StoreFile
from isthmus.training.file_backed import disk_folder
from isthmus.training.layout import pack
from isthmus.training.snapshot import Snapshot
from isthmus.training.stored import StoredTensor, TensorFile, stored_tensors

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")

SendReport = Callable[[ItemReported, Snapshot | None], None]


class PartWriter:
    """Sends reports in order: those that follow a part wait until it is written."""

    def __init__(self, urls: Sequence[str], send: SendReport) -> None:
        """`urls`: below which parts may be written. `send` is called by the compute lane until the first part is to be
        written, then by the writer's thread; with the snapshot that is to go to the coordinator."""
        self._urls = urls
        self._send = send
        self._waiting: queue.SimpleQueue[Callable[[], None]] | None = None

    def report(self, done: ItemReported, item: Item, place: StorePlace | None, taken: Snapshot | None) -> None:
        """Send a report; of a save after its part is written to `place`, where that may be."""
        writes = place is not None and item.to_store and self._may_write(place, item.step)
        if taken is None or place is None or not writes or not taken.headers:
            self._in_order(lambda: self._send(done, taken))
            return
        if self._waiting is None:
            self._waiting = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._waiting,), name="checkpoints", daemon=True).start()
        self._in_order(lambda: self._write(done, item.step, place, taken))

    def _may_write(self, place: StorePlace, step: int) -> bool:
        url = f"{place.url}/{checkpoint_file(step, place.name)}"
        return _NAME.fullmatch(place.name) is not None and is_below(url, self._urls)

    def _in_order(self, act: Callable[[], None]) -> None:
        if self._waiting is None:
            act()
        else:
            self._waiting.put(act)

    def _work(self, waiting: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            waiting.get()()

    def _write(self, done: ItemReported, step: int, place: StorePlace, taken: Snapshot) -> None:
        taken.wait()
        try:
            written = write_part(place, step, taken)
        except Exception as e:  # whatever a library raises: the coordinator gets the part
            self._send(msgspec.structs.replace(done, unwritten=in_one_line(e)), taken)
        else:
            self._send(msgspec.structs.replace(done, written=written), None)


def write_part(place: StorePlace, step: int, taken: Snapshot) -> WrittenPart:
    """Write a stage's state to the store, by way of a temporary file. UserError or OSError where that fails."""
    with tempfile.TemporaryDirectory(prefix="isthmus-part-", dir=disk_folder()) as folder:
        path, name = Path(folder) / place.name, checkpoint_file(step, place.name)
        headers = [msgspec.structs.replace(h, name=f"{place.prefix}{h.name}") for h in taken.headers]
        file = TensorFile(path, headers)
        try:
            for header, tensor in zip(headers, taken.sent().values(), strict=True):
                file.put(header, tensor.pieces() if isinstance(tensor, StoredTensor) else iter((pack(tensor),)))
            sha256 = file.finish()
        finally:
            file.close()
        there = StoreFile.uploaded(place.url, name, path)
        tensors = tuple(_written(tensor, place.prefix) for tensor in stored_tensors(path).values())
    part = WeightFile(model=place.url, file=name, size=there.size, version=there.version, tensors=tensors)
    return WrittenPart(file=part, sha256=sha256)


def _written(tensor: StoredTensor, prefix: str) -> FileTensor:
    digest = hashlib.sha256()
    for piece in tensor.pieces():
        digest.update(piece)
    return FileTensor(
        name=tensor.key.removeprefix(prefix),
        key=tensor.key,
        dtype=tensor.header.dtype,
        shape=tensor.header.shape,
        sha256=digest.hexdigest(),
        offset=tensor.offset,
    )
