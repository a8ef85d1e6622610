"""A file of a store of which ranges are read, and no more: as it was when it was looked up, or not at all."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from isthmus.stores.store import RemoteStoreError, Store

REQUEST_BYTES = 8 << 20  # of one request at most
AT_ONCE = 4  # requests on the way: what is in memory beside what is read


class StoreFile(msgspec.Struct, frozen=True):
    """Reading raises RemoteStoreError, also where the store says another version afterwards: the bytes before may be
    of either."""

    url: str  # of its folder
    name: str
    size: int
    version: str  # what the store says of its contents

    @staticmethod
    def found(url: str, name: str) -> StoreFile | None:
        """None where there is no such file. RemoteStoreError for a store that says nothing of the contents."""
        said = _store(url).version(name)
        if said is not None and not said[1]:
            raise RemoteStoreError(f"store {url}: {name}: got no version of it, expected an ETag, digest or time")
        return StoreFile(url, name, *said) if said is not None else None

    @staticmethod
    def uploaded(url: str, name: str, local: Path) -> StoreFile:
        """A file that is written to the store now. RemoteStoreError where it is not there afterwards."""
        _store(url).upload_in_time(local, name)
        found, size = StoreFile.found(url, name), local.stat().st_size
        if found is None or found.size != size:
            got = "no such file" if found is None else f"{found.size} bytes"
            raise RemoteStoreError(f"store {url}: {name}: got {got}, expected {size} bytes: it was just written")
        return found

    def check(self) -> None:
        """RemoteStoreError unless it is still as it was."""
        if (said := _store(self.url).version(self.name)) != (self.size, self.version):
            got = "no such file" if said is None else f"{said[0]} bytes, {said[1] or 'no version'}"
            raise RemoteStoreError(
                f"store {self.url}: {self.name}: got {got}, expected {self.size} bytes, {self.version}: it has changed"
            )

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from the start to before the end, in order, a request each. The last one comes when all are known
        to be of this version."""
        spans = _requests([(start, end)])
        for at in range(0, len(spans), AT_ONCE):
            found = _store(self.url).ranges(self.name, spans[at : at + AT_ONCE])
            if at + AT_ONCE >= len(spans):
                self.check()
            yield from found

    def fill(self, wanted: Sequence[tuple[int, memoryview]], stopped: Callable[[], bool] = lambda: False) -> bool:
        """Fill each buffer from its offset in the file, by as few requests as ranges that touch allow. False where
        `stopped` said so before the end."""
        ordered = sorted((w for w in wanted if w[1].nbytes), key=lambda w: w[0])
        spans, first = _requests([(at, at + buffer.nbytes) for at, buffer in ordered]), 0
        for group in range(0, len(spans), AT_ONCE):
            if stopped():
                return False
            asked = spans[group : group + AT_ONCE]
            for (start, end), part in zip(asked, _store(self.url).ranges(self.name, asked), strict=True):
                while first < len(ordered) and ordered[first][0] + ordered[first][1].nbytes <= start:
                    first += 1
                for at, buffer in ordered[first:]:
                    if at >= end:
                        break
                    low, high = max(at, start), min(at + buffer.nbytes, end)
                    if low < high:
                        buffer[low - at : high - at] = part[low - start : high - start]
        self.check()
        return True


def _requests(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in order: those that touch together, none empty, none larger than a request may be."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > start:
            joined.append((start, end))
    return [(at, min(at + REQUEST_BYTES, end)) for start, end in joined for at in range(start, end, REQUEST_BYTES)]


def _store(url: str) -> Store:
    return _opened(url, os.getpid())  # no connection outlives a fork


@functools.lru_cache(maxsize=8)
def _opened(url: str, process: int) -> Store:
    return Store(url)
