"""An emulated link in front of a channel: a token bucket, then a delay line.

A message that is ready at time t starts to leave when the one before it has left, takes size / bandwidth, and
arrives `latency` after its last byte left:

    start = max(t, free)      free = start + size / bandwidth      arrival = free + latency

    the sender's thread:  ──┤ message 1 ├┤ message 2 ├──────────────────►  sleeps until a message has left
    the delay line's:     ──────latency──────┤ message 1 ├┤ message 2 ├─►  releases each chunk when it arrives

All times are absolute: a thread that wakes late does not slow the link down, and chunks are released at their own
arrival times, so the real socket behind adds next to nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from isthmus.fleet import Link
from isthmus.runtime.transport.channel import CHUNK_BYTES, Channel, Payload, chunks

SLICE_S = 0.002  # a chunk lasts about this long on its link: fine enough for small messages, coarse enough for the CPU
MIN_CHUNK_BYTES = 4096
AHEAD_S = 0.25  # what leaves so much later waits where it is


class ShapedLink:
    """One direction of an emulated link. One thread sends."""

    def __init__(self, channel: Channel, shape: Link, on_error: Callable[[Exception], None]) -> None:
        self._channel = channel
        self._shape = shape
        self._on_error = on_error
        self._free_s = 0.0
        self._line: queue.SimpleQueue[tuple[float, memoryview, Callable[[], None] | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._release, name=f"delay to {channel.other}", daemon=True)
        self._thread.start()

    def send(self, pieces: Payload, ready_s: float, arrived: Callable[[], None] | None = None) -> tuple[float, float]:
        """Put a message that is ready since `ready_s` onto the link and wait until it has left. Its memory is read
        until `arrived` is called, in another thread.

        Returns the start and the end of its leaving, in seconds of the monotonic clock.
        """
        shape, start_s = self._shape, max(ready_s, self._free_s)
        left_bytes = 0
        chunk_bytes = min(CHUNK_BYTES, max(MIN_CHUNK_BYTES, int(shape.bandwidth_bytes_per_s * SLICE_S)))
        for chunk in chunks(pieces, chunk_bytes):
            sleep_until(self._free_s - AHEAD_S)  # what is read from a file is not all in memory
            left_bytes += chunk.nbytes
            self._free_s = start_s + left_bytes / shape.bandwidth_bytes_per_s
            self._line.put((self._free_s + shape.latency_s, chunk, None))
        if arrived is not None:
            self._line.put((0.0, memoryview(b""), arrived))
        sleep_until(self._free_s)
        return start_s, self._free_s

    def reshape(self, shape: Link) -> None:
        """Messages that are sent from now on find the link so. Any thread."""
        self._shape = shape

    def close(self) -> None:
        """Wait until all that has left has arrived."""
        self._line.put(None)
        self._thread.join()

    def _release(self) -> None:
        try:
            while (entry := self._line.get()) is not None:
                arrival_s, chunk, arrived = entry
                sleep_until(arrival_s)
                self._channel.send_chunk(chunk)
                if arrived is not None:
                    arrived()
                del entry, chunk  # while it waits, the line must not keep a tensor alive
        except Exception as e:  # the thread's owner decides: a line has no one to raise to
            self._on_error(e)


def sleep_until(time_s: float) -> None:
    """Sleep until the monotonic clock shows `time_s`."""
    if (left_s := time_s - time.monotonic()) > 0:
        time.sleep(left_s)
