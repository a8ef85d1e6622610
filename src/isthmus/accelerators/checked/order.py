"""Which accesses come before which: vector clocks of the streams and of the host, last accesses of each allocation.

A clock maps a stream's number to how many of that stream's accesses are known to be done. Events carry clocks. All
threads of the host share one: what one of them has waited for, the others know of by the program's own locks.
"""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple, Protocol

import torch

from isthmus.accelerators.accelerator import Stream
from isthmus.accelerators.checked.misuse import DataRace, FreedTooEarly
from isthmus.accelerators.checked.places import caller, shown

Clock = dict[int, int]

LOCK = threading.RLock()
"""Over all that this package keeps. Not held while an operator computes."""

_numbers = itertools.count(1)


def join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


class HostOrder:
    """What the host has waited for."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0

    def reach(self, clock: Clock) -> None:
        join(self.clock, clock)
        self.version += 1


HOST_ORDER = HostOrder()


class Point(NamedTuple):
    """One operator or copy on a stream."""

    stream: int
    tick: int
    what: str
    place: tuple[str, int, str]

    def __str__(self) -> str:
        return f"{self.what} on stream {self.stream} ({shown(self.place)})"


class CheckedStream(Stream):
    def __init__(self, device: int) -> None:
        self.device = device
        self.number = next(_numbers)
        self.clock: Clock = {}
        self.freed: list[Allocation] = []
        """Allocated here, dropped, while other streams were at work with them."""
        self._tick = 0
        self._seen = -1

    def launch(self, what: str) -> Point:
        """The next work of this stream: after all that the host has waited for."""
        self.catch_up()
        self._tick += 1
        self.clock[self.number] = self._tick
        return Point(self.number, self._tick, what, caller())

    def catch_up(self) -> None:
        if self._seen != HOST_ORDER.version:
            join(self.clock, HOST_ORDER.clock)
            self._seen = HOST_ORDER.version

    def after(self, point: Point) -> bool:
        return self.clock.get(point.stream, 0) >= point.tick

    def may_allocate(self) -> None:
        """Memory that was dropped here is given out again: FreedTooEarly if another stream is still at work there."""
        while self.freed:
            block = self.freed[-1]
            for point in block.outstanding():
                if not self.after(point):
                    self.freed.clear()
                    raise FreedTooEarly(
                        f"{block.size} bytes of stream {self.number} were dropped while {point} worked with them: "
                        f"expected used_here on stream {point.stream}, or a wait for it before"
                    )
            self.freed.pop()


class Pending(Protocol):
    """A copy that is put off."""

    def land(self) -> None: ...


class Allocation:
    """Memory of the device, or a host buffer, and who accesses it."""

    def __init__(self, size: int, storage: torch.UntypedStorage | None, owner: CheckedStream | None) -> None:
        """`storage` is the host memory that stands for the device's."""
        self.size = size
        self.storage = storage
        self.owner = owner
        self.written: Point | None = None
        self.reads: dict[int, Point] = {}
        self.used_on: set[int] = set()
        self.pending: list[Pending] = []

    def access(self, stream: CheckedStream, point: Point, *, write: bool) -> None:
        """DataRace where an earlier access is not known to be done. Copies that this must come after are made."""
        for earlier in (self.written, *self.reads.values()) if write else (self.written,):
            if earlier is not None and not stream.after(earlier):
                raise DataRace(
                    f"{point} {'writes' if write else 'reads'} what {earlier} "
                    f"{'writes' if earlier is self.written else 'reads'}: expected an event between them"
                )
        for copy in tuple(self.pending):
            copy.land()
        if write:
            self.written = point
            self.reads = {}
        else:
            self.reads[stream.number] = point

    def outstanding(self) -> list[Point]:
        """Last accesses of streams that neither own it nor have said that they use it."""
        points = [p for p in (self.written, *self.reads.values()) if p is not None]
        owner = self.owner.number if self.owner is not None else 0
        return [p for p in points if p.stream != owner and p.stream not in self.used_on]
