"""The files of a stream: paths, globs and folders of this machine, or URLs that fsspec opens."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar, cast

import msgspec

from isthmus.atomic_write import atomic_write
from isthmus.data.dataset import Array
from isthmus.data.within import is_confined, opener
from isthmus.errors import StepError, UserError
from isthmus.extensions import import_extra
from isthmus.reading import parse_msgpack, read_file

KIND = "stream"
PARQUET, TAR = ".parquet", ".tar"
ENDINGS = (PARQUET, TAR)
FETCHED = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "hf"})
"""Protocols that a device opens for somebody else, where its owner allows this kind. Others lead back into the machine
or its network."""
_LOCAL = ("file", "local")
_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
MOST_IN_RANGE = 1_000_000


class StreamFile:
    """One file. Only ranges of it are read."""

    def __init__(self, url: str, open_here: Callable[[str | Path], BinaryIO] | None) -> None:
        """`open_here` opens a path of this machine; without it fsspec opens the URL."""
        self.url = url
        self._open_here = open_here

    @property
    def is_remote(self) -> bool:
        return self._open_here is None

    def open(self, ahead_bytes: int = 0) -> BinaryIO:
        """Behind a URL each read is a request for as many bytes, and for `ahead_bytes` more, which the next reads take.
        UserError where it cannot be opened."""
        with readable(self.url):
            if self._open_here is not None:
                return self._open_here(self.url)
            system, path = _at(self.url)
            if ahead_bytes:
                return cast(BinaryIO, system.open(path, "rb", block_size=ahead_bytes, cache_type="readahead"))
            return cast(BinaryIO, system.open(path, "rb", cache_type="none"))

    def version(self) -> str:
        """Other for other contents: of a path its inode, size and times; of a URL what the store says of it."""
        with readable(self.url):
            if self._open_here is not None:
                found = os.stat(self.url)
                return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
            system, path = _at(self.url)
            said: dict[str, object] = system.info(path)
            kept = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "updated")
            return " ".join(str(said[key]) for key in kept if key in said)


def stream_files(sources: Sequence[str]) -> list[StreamFile]:
    """All files that the sources name, in the order of the sources, and of a glob or folder by name.

    UserError for a source without files, and for files of several formats.
    """
    open_here = opener()
    found: dict[str, StreamFile] = {}
    for source in (one for pattern in sources for one in _in_braces(pattern)):
        if (local := _local(source)) is not None:
            names, open_ = _here(local), open_here
        else:
            names, open_ = _elsewhere(source), None
        if not names:
            raise UserError(
                f"{KIND} option 'path': no file matches {source!r}, expected Parquet files or tar shards: a path, a "
                "glob, a folder or a URL"
            )
        found |= {name: StreamFile(name, open_) for name in names}
    if not found:
        raise UserError(f"{KIND} option 'path': got none, expected paths, globs, folders or URLs")
    endings = {ending_of(name) for name in found}
    if len(endings) > 1:
        raise UserError(f"{KIND} option 'path': got {' and '.join(sorted(endings))} files, expected one format")
    return list(found.values())


def stream_file(source: str) -> StreamFile:
    """One file of any ending."""
    local = _local(source)
    return StreamFile(source, None) if local is None else StreamFile(local, opener())


def ending_of(name: str) -> str:
    """UserError for a file that is no stream's."""
    for ending in ENDINGS:
        if name.lower().partition("?")[0].endswith(ending):
            return ending
    raise UserError(
        f"{KIND} option 'path': got {name}, expected a name that ends in {' or '.join(ENDINGS)}: in these the place of "
        "a sample is known before all others are read"
    )


def _in_braces(pattern: str) -> Iterator[str]:
    """`shard-{000..002}.tar` names three files, as WebDataset writes it."""
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    first, last = int(found[1]), int(found[2])
    if not 0 <= last - first < MOST_IN_RANGE:
        raise UserError(
            f"{KIND} option 'path': got {found[0]}, expected a range that goes up, to {MOST_IN_RANGE} files"
        )
    for number in range(first, last + 1):
        yield from _in_braces(f"{pattern[: found.start()]}{number:0{len(found[1])}}{pattern[found.end() :]}")


def _local(source: str) -> str | None:
    """The path, if the source is of this machine. UserError for a URL that may not be opened."""
    if "::" in source:
        raise UserError(f"{KIND} option 'path': got {source!r}, expected one URL without '::'")
    protocol, separator, path = source.partition("://")
    if not separator:
        return os.path.expanduser(source)
    if is_confined() and protocol not in FETCHED:
        raise UserError(f"{KIND} option 'path': got {source!r}, expected one of: {', '.join(sorted(FETCHED))}")
    return path if protocol in _LOCAL else None


def _here(path: str) -> list[str]:
    if os.path.isdir(path):
        return sorted(str(file) for file in Path(path).rglob("*") if file.suffix in ENDINGS and file.is_file())
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def _elsewhere(url: str) -> list[str]:
    with readable(url):
        system, path = _at(url)
        if any(mark in path for mark in "*?[") and not url.startswith("http"):
            names: list[str] = sorted(system.glob(path))
        elif url.lower().partition("?")[0].endswith(ENDINGS):
            return [url]
        else:
            names = sorted(name for name in system.find(path) if name.endswith(ENDINGS))
        return [str(system.unstrip_protocol(name)) for name in names]


def _at(url: str) -> tuple[Any, str]:
    """fsspec's file system, which has no types, and the path in it."""
    return import_extra("fsspec.core", f"data of kind {KIND}").url_to_fs(url)


@contextmanager
def readable(url: str, kind: str = KIND) -> Generator[None]:
    """Report a failure with a file of data of this kind in one line that names it."""
    try:
        yield
    except (UserError, StepError):
        raise
    except MemoryError as e:  # pyarrow's is one
        raise MemoryError(f"{kind}: cannot read {url}: {' '.join(str(e).split()) or 'not enough memory'}") from e
    except OSError as e:
        nothing = "nothing is there, or nobody answers" if isinstance(e, FileNotFoundError) else ""
        raise UserError(f"{kind}: cannot read {url}: {e.strerror or nothing or ' '.join(str(e).split())}") from e
    except Exception as e:  # pyarrow, tarfile and each of fsspec's file systems raise families of their own
        raise UserError(f"{kind}: cannot read {url}: {' '.join(str(e).split()) or type(e).__name__}") from e


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
