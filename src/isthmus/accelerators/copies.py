"""Copies between the host and an accelerator that stop neither: single ones, with an event behind them; and streams of
them beside what it computes, DT-FM's three slots.

A copy from or to pageable memory, and `item()`, `tolist()`, `cpu()` of a tensor of the accelerator, make the host wait
for all that its stream has been given. On the CPU nothing is copied.

    up        ──┤ 1 ├──┤ 2 ├──────────────────►   what arrives goes up as it arrives, and is unpacked there
                     w      w
    compute   ───────┤ F1 ├─┤ F2 ├─────────────►  w: waits for the event behind the copy; the host waits for nothing
                           r      r
    down      ─────────────┤ 1 ├──┤ 2 ├────────►  r: waits for the event behind the tasklet; packs, then copies

A way between the host and an accelerator is a stream. Its copies go through host buffers that are used again. Only code
that needs the bytes on the host waits for the event behind them. The CPU has no ways: nothing is copied there.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import Accelerator, DeviceClock, DeviceEvent
from isthmus.errors import InternalError


class PendingRead:
    """Numbers on their way to the host, behind what the current stream has been given so far."""

    def __init__(self, accelerator: Accelerator, numbers: Tensor) -> None:
        self._found = numbers
        self._done = None
        if accelerator.asynchronous and numbers.numel():
            self._found = host_like(accelerator, numbers)
            self._found.copy_(numbers, non_blocking=True)
            self._done = accelerator.record()

    def values(self) -> Tensor:
        """On the host; waits until they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._found


def to_device(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """A host tensor where the accelerator computes, for its current stream: strides as they were, without gaps. On the
    CPU the tensor itself. The host waits for nothing."""
    if not accelerator.asynchronous or tensor.device == accelerator.device:
        return tensor
    made = torch.empty_like(tensor, device=accelerator.device)
    if tensor.numel():
        staged = host_like(accelerator, tensor)
        staged.copy_(tensor)
        made.copy_(staged, non_blocking=True)
    return made


def all_to_device(accelerator: Accelerator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each as by `to_device`."""
    return {name: to_device(accelerator, tensor) for name, tensor in tensors.items()}


def to_host(accelerator: Accelerator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory of what lies on the accelerator, all awaited once; others as they are."""
    readings = {
        name: PendingRead(accelerator, t) if t.device == accelerator.device else t for name, t in tensors.items()
    }
    return {name: r.values() if isinstance(r, PendingRead) else r for name, r in readings.items()}


def host_like(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """Host memory for a tensor's elements that copies reach without waiting, with its strides where it has no gaps."""
    shape = torch.empty_like(tensor, device="meta")
    buffer = accelerator.host_buffer(shape.numel() * shape.element_size())
    return buffer.view(tensor.dtype).as_strided(shape.shape, shape.stride())


AHEAD = 2  # host buffers of one size that may be on their way up: one is filled while the other is copied
UP_BYTES = 1 << 22  # copied at once: the first bytes go up while the last ones arrive
Fill = Callable[[memoryview], None]  # fills host memory with what comes next


class CopyLabel(NamedTuple):
    """The name of a copy in a trace."""

    name: str
    item: int = -1
    micro_batch: int = -1


class HostBuffers:
    """Host buffers by size. What a plan lets travel has few sizes: after the first step none is allocated."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._leaving: dict[int, deque[tuple[Tensor, DeviceEvent]]] = {}

    def take(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes]; waits where `AHEAD` of this size are still read by copies."""
        with self._lock:
            free = self._free.get(size_bytes)
            if free:
                return free.pop()
            leaving = self._leaving.get(size_bytes)
            if not leaving or (len(leaving) < AHEAD and not leaving[0][1].done()):
                return self._accelerator.host_buffer(size_bytes)
            buffer, read = leaving.popleft()
        read.synchronize()
        return buffer

    def give(self, buffer: Tensor, read: DeviceEvent | None = None) -> None:
        """It may be used again, once the event is done."""
        with self._lock:
            if read is None:
                self._free.setdefault(buffer.numel(), []).append(buffer)
            else:
                self._leaving.setdefault(buffer.numel(), deque()).append((buffer, read))


class CopyBatch:
    """Copies made in one go, and the events before the first and behind the last."""

    def __init__(self, way: CopyStream, cargo: CopyLabel) -> None:
        self._way = way
        self.cargo = cargo
        self.began: DeviceEvent | None = None
        self.size_bytes = 0
        self.buffers: list[Tensor] = []
        self._done: DeviceEvent | None = None

    @property
    def done(self) -> DeviceEvent:
        if self._done is None:
            raise InternalError("a trip was used before it was closed")
        return self._done

    def begin(self) -> None:
        """Begin its time: work that is queued from now on counts."""
        self.began = self.began or self._way.event()

    def down(self, flat: Tensor) -> Tensor:
        """The flat tensor's bytes in a host buffer, once `done` is. To be given back with `release`."""
        buffer = self._way.buffers.take(flat.numel() * flat.element_size())
        self.buffers.append(buffer)
        self.size_bytes += buffer.numel()
        if buffer.numel():
            buffer.view(flat.dtype).copy_(flat, non_blocking=True)
        return buffer

    def up(self, size_bytes: int, fill: Fill) -> Tensor:
        """uint8 [size_bytes] on the accelerator, for this way's stream, of what fills a host buffer piece by piece."""
        made = torch.empty(size_bytes, dtype=torch.uint8, device=self._way.accelerator.device)
        if not size_bytes:
            return made
        buffer = self._way.buffers.take(size_bytes)
        memory: memoryview = buffer.numpy().data
        for start in range(0, size_bytes, UP_BYTES):
            piece = slice(start, min(start + UP_BYTES, size_bytes))
            fill(memory[piece])
            self.begin()
            made[piece].copy_(buffer[piece], non_blocking=True)
        self.buffers.append(buffer)
        self.size_bytes += size_bytes
        return made

    def raised(self, tensor: Tensor) -> Tensor:
        """A host tensor's elements on the accelerator, for this way's stream, in the order of their indices."""
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        memory: memoryview = source.numpy().data
        at = 0

        def fill(buffer: memoryview) -> None:
            nonlocal at
            buffer[:] = memory[at : at + buffer.nbytes]
            at += buffer.nbytes

        return self.up(source.numel(), fill).view(tensor.dtype).view(tensor.shape)

    def close(self, done: DeviceEvent) -> None:
        self._done = done

    def release(self) -> None:
        """Release the host buffers: the data copied to the host has been read from them."""
        for buffer in self.buffers:
            self._way.buffers.give(buffer)
        self.buffers = []


class CopyStream:
    """One direction of one link, or of one use. One thread travels it."""

    def __init__(
        self,
        accelerator: Accelerator,
        clock: DeviceClock | None = None,
        on_done: Callable[[CopyBatch, float, float], None] = lambda trip, start_s, end_s: None,
    ) -> None:
        """`on_done` hears of trips when they are over, if there is a clock: start and end in seconds of the host's
        monotonic clock. It may be called by any thread that calls `tell`."""
        self.accelerator = accelerator
        self.buffers = HostBuffers(accelerator)
        self._stream = accelerator.new_stream()
        self._clock = clock
        self._on_done = on_done
        self._under_way: deque[CopyBatch] = deque()
        self._telling = threading.Lock()
        self._last: DeviceEvent | None = None

    @contextlib.contextmanager
    def up(self, cargo: CopyLabel) -> Generator[CopyBatch]:
        """Inside of it this thread's work is queued on this way."""
        with self._trip(cargo, None) as trip:
            yield trip
        for buffer in trip.buffers:
            self.buffers.give(buffer, trip.done)
        trip.buffers = []

    @contextlib.contextmanager
    def down(self, cargo: CopyLabel, after: DeviceEvent) -> Generator[CopyBatch]:
        """The same, behind an event."""
        with self._trip(cargo, after) as trip:
            yield trip

    @contextlib.contextmanager
    def _trip(self, cargo: CopyLabel, after: DeviceEvent | None) -> Generator[CopyBatch]:
        self.tell()
        trip = CopyBatch(self, cargo)
        with self.on():
            if after is not None:
                self.accelerator.wait(after)
                trip.begin()
            yield trip
            trip.close(self.event())
        self._last = trip.done
        if self._clock is not None:
            self._under_way.append(trip)

    def on(self) -> contextlib.AbstractContextManager[object]:
        """Inside of it, this thread's work is queued on this stream."""
        return self.accelerator.on(self._stream)

    def event(self) -> DeviceEvent:
        return self.accelerator.record(timed=self._clock is not None)

    def hold(self) -> None:
        """The current stream's work from now on waits for all copies made so far: it may write what they read."""
        if self._last is not None:
            self.accelerator.wait(self._last)

    def tell(self) -> None:
        """Report the copies that are complete."""
        if self._clock is None:
            return
        with self._telling:
            while self._under_way and self._under_way[0].done.done():
                trip = self._under_way.popleft()
                if trip.began is not None:
                    self._on_done(trip, self._clock.at_s(trip.began), self._clock.at_s(trip.done))
