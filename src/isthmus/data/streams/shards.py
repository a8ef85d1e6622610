"""The interface of a stream to a file format, and facts kept of a file so that it need not be looked through again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from isthmus.atomic_write import atomic_write
from isthmus.data.dataset import Array
from isthmus.data.streams.files import StreamFile, readable
from isthmus.errors import UserError
from isthmus.reading import parse_msgpack, read_file

Form = Literal["numbers", "image", "text", "other"]
Kept = TypeVar("Kept")
HEAD_BYTES = 64 << 10  # bytes of a file's beginning in its digest
WORTH_BYTES = 4 << 20  # a smaller file of this machine is looked through as quickly again
_RACY_NS = 2_000_000_000  # a file that changed less than this ago may change once more within the same time stamp


class Shard(msgspec.Struct, frozen=True):
    """One file, as far as it is known before its samples are read."""

    blocks: tuple[int, ...]  # samples of each block: what is read together
    text_sizes: tuple[int, ...]  # how much text each has beside the others, about; empty where no text was asked for
    digest: str  # sha256 (hex) of the file's index and its first `HEAD_BYTES`


class Shards(Protocol):
    """Files of one format. UserError from each method for a file that cannot be read or lacks what is asked for."""

    files: Sequence[StreamFile]

    @property
    def sizes_are_bytes(self) -> bool:
        """Return whether `Shard.text_sizes` are bytes, with a line's end for each text; else in any unit."""
        ...

    def shard(self, file: int, text: str) -> Shard:
        """`text` is the column of texts, or empty."""
        ...

    def columns(self) -> dict[str, Form]:
        """Those of the first file."""
        ...

    def classes(self, name: str) -> int | None:
        """The bound that labels in a column stay below, where the files state it."""
        ...

    def numbers(self, file: int, block: int, name: str) -> Array:
        """[samples, *shape]"""
        ...

    def contents(self, file: int, block: int, name: str) -> list[bytes]:
        """[samples] of UTF-8 texts, or of encoded images."""
        ...


def kept(file: StreamFile, use: str, form: type[Kept], make: Callable[[], Kept]) -> Kept:
    """Return the facts that `make` finds of a file, or found before if the file has not changed since. They are kept in
    the user's cache folder, where it can be written."""
    version = f"{use} {file.version()}"
    with readable(file.url):
        if not file.is_remote and os.stat(file.url).st_size < WORTH_BYTES:
            return make()
    place = _place(file, use)
    with contextlib.suppress(OSError, UserError):
        known, found = parse_msgpack(read_file(place), tuple[str, form], str(place))
        if known == version:
            return found
    begun_ns = time.time_ns()
    made = make()
    if file.is_remote or os.stat(file.url).st_ctime_ns < begun_ns - _RACY_NS:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(place, msgspec.msgpack.encode((version, made)), private=True, durable=False)
    return made


def _place(file: StreamFile, use: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    url = file.url if file.is_remote else os.path.abspath(file.url)
    name = hashlib.sha256(f"{use}\0{url}".encode()).hexdigest()
    return Path(base) / "isthmus" / "streams" / f"{name}.msgpack"
