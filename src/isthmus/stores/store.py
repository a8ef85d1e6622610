"""A folder in a remote store: names under a URL, by way of fsspec. Every failure is one line that names the URL."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from isthmus.errors import UserError
from isthmus.extensions import import_extra

_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""Libraries of our extras, by protocol; fsspec itself names others."""
_RENAMES = {"file", "local", "sftp", "ssh"}
"""Protocols of file systems, where a file that is being written can be seen. Object stores show objects whole."""


class RemoteStoreError(UserError):
    """A store cannot be reached, or refuses."""


class _FileSystem(Protocol):
    """The part of fsspec's AbstractFileSystem that is used."""

    protocol: str | tuple[str, ...]

    def find(self, path: str) -> list[str]: ...
    def cat_file(self, path: str) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> object: ...
    def put_file(self, lpath: str, rpath: str) -> object: ...
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

    def names(self) -> list[str]:
        """Return the names of all files. Fails for a missing bucket, where other calls only report a missing file."""
        with self._asked("cannot be read"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root)
        prefix = self._root.rstrip("/") + "/"
        return sorted(path.removeprefix(prefix) for path in found if path.startswith(prefix))

    def read(self, name: str) -> bytes | None:
        """None where there is no such file."""
        with self._asked(f"{name} cannot be read"):
            try:
                return self._fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        self._put(name, lambda path: self._fs.pipe_file(path, data))

    def upload(self, local: Path, name: str) -> None:
        """Whole or not at all."""
        self._put(name, lambda path: self._fs.put_file(str(local), path))

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
