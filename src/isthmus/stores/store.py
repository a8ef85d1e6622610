"""A folder in a remote store: names under a URL, by way of fsspec. Every failure is one line that names the URL."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

from isthmus.errors import UserError
from isthmus.extensions import import_extra

_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""Libraries of our extras, by protocol; fsspec itself names others."""
_RENAMES = {"file", "local", "sftp", "ssh"}
"""Protocols of file systems, where a file that is being written can be seen. Object stores show objects whole."""


ANSWER_S = 60.0
"""How long a request for a part of a file may take, and for its bytes as much more as at `SLOWEST` bytes a second."""
SLOWEST = 100_000
PIECE_BYTES = 8 << 20  # of an upload to S3, ten at once: the library's own are of 50 MiB and more. S3 takes 10,000.
_VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "Digest", "Last-Modified", "mtime", "created")
"""Words of stores about a file that are others when its contents are, the surest first."""
_FoundT = TypeVar("_FoundT")


class RemoteStoreError(UserError):
    """A store cannot be reached, or refuses."""


class _FileSystem(Protocol):
    """The part of fsspec's AbstractFileSystem that is used."""

    protocol: str | tuple[str, ...]
    async_impl: bool

    def info(self, path: str) -> dict[str, object]: ...
    def cat_ranges(
        self, paths: list[str], starts: list[int], ends: list[int], *, on_error: str, **options: str
    ) -> list[bytes]: ...
    def find(self, path: str) -> list[str]: ...
    def cat_file(self, path: str) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> object: ...
    def put_file(self, lpath: str, rpath: str, **options: int) -> object: ...
    def get_file(self, rpath: str, lpath: str) -> object: ...
    def rm_file(self, path: str) -> object: ...
    def mv(self, path1: str, path2: str) -> object: ...
    def makedirs(self, path: str, exist_ok: bool) -> object: ...
    def invalidate_cache(self) -> None: ...


def is_url(text: str) -> bool:
    """Return whether a text is a URL rather than a path.

    >>> is_url("s3://bucket/runs/first"), is_url("runs/first")
    (True, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


class Store:
    """The folder at `url`. Names are relative to it, parted by slashes. Every method raises RemoteStoreError."""

    def __init__(self, url: str, options: Mapping[str, object] = {}) -> None:
        self.url = url.rstrip("/")
        protocol, _, place = self.url.partition("://")
        if not place:  # fsspec would take `s3:` for a folder of this machine
            raise RemoteStoreError(f"store {url}: names no place, expected one as in s3://bucket/runs/first")
        import_extra("fsspec", f"store {self.url}")
        if (library := _LIBRARIES.get(protocol)) is not None:
            import_extra(library, f"store {self.url}")
        fsspec = cast("Any", importlib.import_module("fsspec.core"))
        try:
            # No instance that somebody made before: it may have other credentials.
            found = fsspec.url_to_fs(self.url, skip_instance_cache=True, **options)
        except Exception as e:  # a protocol that nobody knows, options of another one, a library that is missing
            raise self._refusal("", e) from None
        self._fs, self._root = cast("tuple[_FileSystem, str]", found)
        self._renames = protocol in _RENAMES
        self._pieces = {"chunksize": PIECE_BYTES} if _LIBRARIES.get(protocol) == "s3fs" else {}
        if self._pieces and (silence := _silence(options)):
            raise RemoteStoreError(f"store {self.url}: {silence}")

    def names(self) -> list[str]:
        """Return the names of all files. Fails for a missing bucket, where other calls only report a missing file."""
        with self._asked("cannot be read"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root)
        prefix = self._root.rstrip("/") + "/"
        return sorted(path.removeprefix(prefix) for path in found if path.startswith(prefix))

    def read(self, name: str, *, small: bool = False) -> bytes | None:
        """None where there is no such file. A `small` one comes in a minute, or not at all."""
        with self._asked(f"{name} cannot be read"):
            try:
                ask = lambda: self._fs.cat_file(self._path(name))  # noqa: E731
                return _in_time(ask, ANSWER_S) if small else ask()
            except FileNotFoundError:
                return None

    def version(self, name: str) -> tuple[int, str] | None:
        """The size of a file, and what the store says of its contents now; None where there is no such file."""
        with self._asked(f"{name} cannot be read"):
            self._fs.invalidate_cache()
            try:
                said = _in_time(lambda: self._fs.info(self._path(name)), ANSWER_S)
            except FileNotFoundError:
                return None
        if said.get("type") == "directory" or not isinstance(size := said.get("size"), int):
            return None  # a server of HTTP that says no size reads no ranges either
        return size, next((f"{key} {said[key]}" for key in _VERSIONS if said.get(key)), "")

    def ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of a file from each start to before its end, which is beyond it; requests are made at once."""
        with self._asked(f"{name} cannot be read"):
            starts, ends = [start for start, _ in spans], [end for _, end in spans]
            size = sum(ends) - sum(starts)
            exact = {} if self._fs.async_impl else {"cache_type": "none"}
            paths = [self._path(name)] * len(spans)
            found = _in_time(
                lambda: self._fs.cat_ranges(paths, starts, ends, on_error="raise", **exact), ANSWER_S + size / SLOWEST
            )
            for (start, end), part in zip(spans, found, strict=True):
                if len(part) != end - start:
                    why = ": the server gives no parts of a file" if len(part) > end - start else ""
                    raise RemoteStoreError(f"got {len(part)} bytes, expected {end - start} from byte {start}{why}")
        return found

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        self._put(name, lambda path: self._fs.pipe_file(path, data))

    def upload(self, local: Path, name: str) -> None:
        """Whole or not at all."""
        self._put(name, lambda path: self._fs.put_file(str(local), path, **self._pieces))

    def upload_in_time(self, local: Path, name: str) -> None:
        """The same in as long as a request may take, or not at all: what comes later nobody waits for."""
        most_s = ANSWER_S + local.stat().st_size / SLOWEST
        with self._asked(f"{name} cannot be written"):
            _in_time(lambda: self.upload(local, name), most_s)

    def download(self, name: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        with self._asked(f"{name} cannot be read"):
            self._fs.get_file(self._path(name), str(local))

    def remove(self, names: Iterable[str]) -> None:
        """In this order. What is gone already is no error."""
        for name in names:
            with self._asked(f"{name} cannot be removed"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def _put(self, name: str, put: Callable[[str], object]) -> None:
        path = self._path(name)
        with self._asked(f"{name} cannot be written"):
            if not self._renames:
                put(path)
                return
            folder, _, last = path.rpartition("/")
            self._fs.makedirs(folder, exist_ok=True)
            put(f"{folder}/.{last}.new")
            self._fs.mv(f"{folder}/.{last}.new", path)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _asked(self, failure: str) -> Generator[None]:
        try:
            yield
        except Exception as e:  # each library has its own
            raise self._refusal(failure, e) from None

    def _refusal(self, failure: str, error: Exception) -> RemoteStoreError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return RemoteStoreError(": ".join(filter(None, (f"store {self.url}", failure, reason))))


def _silence(options: Mapping[str, object]) -> str:
    """Return why nobody answers at the address that options or the environment give for S3; empty where somebody does,
    or may later. The library tries for 10 to 20 s before it says so."""
    given = options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    try:
        there = urlsplit(str(given or ""))
        if there.hostname is None or there.scheme in urllib.request.getproxies():
            return ""
        port = there.port or (443 if there.scheme == "https" else 80)
        socket.create_connection((there.hostname, port), timeout=5.0).close()
    except TimeoutError:
        return ""
    except (OSError, ValueError) as e:
        return f"cannot connect to {given}: {(e.strerror if isinstance(e, OSError) else None) or e}"
    return ""


def _in_time(ask: Callable[[], _FoundT], most_s: float) -> _FoundT:
    """Return a library's answer. TimeoutError where it takes longer, whatever its own timeouts are: it is left."""
    answers: queue.SimpleQueue[_FoundT | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(ask())
        except Exception as e:
            answers.put(e)

    threading.Thread(target=work, name="store", daemon=True).start()
    try:
        answer = answers.get(timeout=most_s)
    except queue.Empty:
        raise TimeoutError(f"no answer in {most_s:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
