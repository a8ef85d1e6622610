"""Which accesses come before which: vector clocks of the streams and of the host, last accesses of each allocation.

A clock maps a stream's number to how many of that stream's accesses are known to be done. Events carry clocks. All
threads of the host share one: what one of them has waited for, the others know of by the program's own locks.
"""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import Stream
from isthmus_testing.emulated_accelerator.memory import Block
from isthmus_testing.emulated_accelerator.misuse import DataRace, FreedTooEarly, caller, shown

Clock = dict[int, int]

LOCK = threading.RLock()  # over all that this package keeps. Not held while an operator computes.

_numbers = itertools.count(1)


def join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


class HostOrder:
    """The work that the host has waited for."""

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
        self.working = threading.RLock()
        """Held while an operator or a copy of this stream is made: threads that share it take turns. Before `LOCK`."""
        self.freed: list[DeviceAllocation] = []
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


class PendingWork(Protocol):
    """A copy that is put off."""

    def land(self) -> None: ...


Span = tuple[int, int]  # from a byte of an allocation to the one after the last


def span_of(tensor: Tensor) -> Span:
    """Return the bytes of its memory that a tensor reaches, gaps included."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    steps = sum((n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (1 + steps) * size


class _Access(NamedTuple):
    point: Point
    span: Span

    def within(self, span: Span) -> bool:
        return span[0] <= self.span[0] and self.span[1] <= span[1]

    def meets(self, span: Span) -> bool:
        return self.span[0] < span[1] and span[0] < self.span[1]


class DeviceAllocation:
    """Memory of the device, or a host buffer, and who accesses which part of it."""

    def __init__(
        self,
        size: int,
        storage: torch.UntypedStorage | None,
        owner: CheckedStream | None = None,
        block: Block | None = None,
    ) -> None:
        """`storage` is the host memory that stands for the device's, of which `block` is what the allocator gave."""
        self.size = size
        self.storage = storage
        self.owner = owner
        self.block = block
        self._writes: list[_Access] = []
        self._reads: list[_Access] = []
        self.used_on: set[int] = set()
        self.pending: list[PendingWork] = []

    @property
    def written(self) -> Point | None:
        """Last."""
        return self._writes[-1].point if self._writes else None

    def made(self, point: Point | None) -> None:
        """All of it is written by an operator that nothing can come before."""
        self._writes = [] if point is None else [_Access(point, (0, max(self.size, 1)))]

    def access(self, stream: CheckedStream, point: Point, *, write: bool, span: Span | None = None) -> None:
        """DataRace where an earlier access to the same bytes is not known to be done. Copies that this must come after
        are made. Without a span it is all of the memory."""
        span = span or (0, max(self.size, 1))
        for earlier in (*self._writes, *(self._reads if write else ())):
            if earlier.meets(span) and not stream.after(earlier.point):
                raise DataRace(
                    f"{point} {'writes' if write else 'reads'} what {earlier.point} "
                    f"{'writes' if earlier in self._writes else 'reads'}: expected an event between them"
                )
        for copy in tuple(self.pending):
            copy.land()
        access = _Access(point, span)
        if write:
            self._writes = [*(w for w in self._writes if not w.within(span)), access]
            self._reads = [r for r in self._reads if not r.within(span)]
        else:
            others = (r for r in self._reads if r.point.stream != stream.number or not r.within(span))
            self._reads = [*others, access]

    def outstanding(self) -> list[Point]:
        """Last accesses of streams that neither own it nor have said that they use it."""
        points = [access.point for access in (*self._writes, *self._reads)]
        owner = self.owner.number if self.owner is not None else 0
        return [p for p in points if p.stream != owner and p.stream not in self.used_on]
