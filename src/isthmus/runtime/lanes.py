"""The send lane: what crosses a link leaves through here, one thread per link, beside the compute lane.

An emulated link is a token bucket, then a delay line. A message handed over at time t starts to leave when the
one before it has left, takes size / bandwidth, and arrives `latency` after its last byte left:

    start = max(t, free)      free = start + size / bandwidth      arrival = free + latency

Chunks are released at their own arrival times, so the real socket behind adds next to nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.runtime.channel import SocketChannel, chunks, frame
from isthmus.runtime.messages import AnyMessage, ParcelMessage
from isthmus.training.layout import pack

SLICE_S = 0.002
"""A shaped chunk lasts about this long on its link: fine enough for small messages, coarse enough for the CPU."""
MIN_CHUNK_BYTES = 4096


class Departure(msgspec.Struct, frozen=True):
    """When a message left: the start and end of its way onto the link."""

    message: AnyMessage
    start_s: float
    end_s: float
    size_bytes: int
    wire_bytes: int


class Credits:
    """Bytes that may still be sent before the receiver says that it has taken some. Granted ahead."""

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size_bytes: int, patience_s: float, other: str) -> None:
        """Wait until the bytes fit the window. The receiver may keep back a quarter of it unsaid, so a message of
        any size goes once no more than that is on the way."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(size_bytes), patience_s):
                raise PeerError(f"{other}: took none of {self._used} bytes for {patience_s:g} s")
            self._used += size_bytes

    def _fits(self, size_bytes: int) -> bool:
        return 4 * self._used <= self._window or self._used + size_bytes <= self._window

    def give(self, size_bytes: int) -> None:
        with self._changed:
            self._used = max(0, self._used - size_bytes)
            self._changed.notify_all()


class SendLane:
    """One link's queue of outgoing messages and the thread that sends them."""

    def __init__(
        self,
        channel: SocketChannel,
        *,
        shape: Link | None = None,
        credits: Credits | None = None,
        patience_s: float = 60.0,
        on_departure: Callable[[Departure], None] = lambda _: None,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._channel = channel
        self._shape = shape
        self._credits = credits
        self._patience_s = patience_s
        self._on_departure = on_departure
        self._on_error = on_error
        self._free_s = 0.0
        self._queue: queue.SimpleQueue[tuple[float, AnyMessage, Sequence[Tensor]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"send to {channel.other}", daemon=True)
        self._thread.start()

    def put(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Hand over a message; returns at once. Copies to host memory and packing happen in the lane."""
        self._queue.put((time.monotonic(), message, tensors))

    def close(self, flush_s: float = 5.0) -> None:
        """Send what is queued, then end."""
        self._queue.put(None)
        self._thread.join(flush_s)

    def _run(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                self._send(*entry)
        except Exception as e:  # the thread's owner decides: a lane has no one to raise to
            self._on_error(e)

    def _send(self, handed_s: float, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        payload = [pack(t) for t in tensors]
        size_bytes = sum(p.nbytes for p in payload)
        if self._credits is not None and isinstance(message, ParcelMessage):
            self._credits.take(size_bytes, self._patience_s, self._channel.other)
        if self._shape is None:
            start_s = time.monotonic()
            wire_bytes = self._channel.send(message, payload)
            end_s = time.monotonic()
        else:
            start_s = max(handed_s, self._free_s)
            wire_bytes = self._send_shaped(frame(message, payload), start_s, self._shape)
            end_s = self._free_s
        self._on_departure(Departure(message, start_s, end_s, size_bytes, wire_bytes))

    def _send_shaped(self, pieces: Sequence[memoryview], start_s: float, shape: Link) -> int:
        self._free_s = start_s
        size = max(MIN_CHUNK_BYTES, int(shape.bandwidth_bytes_per_s * SLICE_S))
        for chunk in chunks(pieces, size):
            self._free_s += chunk.nbytes / shape.bandwidth_bytes_per_s
            wait_s = self._free_s + shape.latency_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            self._channel.send_chunk(chunk)
        return sum(p.nbytes for p in pieces)
