"""The send lane: what crosses a link leaves through here, one thread per link, beside the compute lane.

Messages leave in the order in which they were handed over, but for credits: what grants the other side room overtakes
what waits for room. Were it not so, two full windows would wait for each other's grants, stuck behind parcels. Nor does
a heartbeat wait for room: a receiver that is busy for long would take the sender for dead. What is
handed over for the background goes while nothing else can.

What is to be packed is packed by a second thread of the lane, from the moment it is handed over, while the messages
before it are on their way.

An emulated link in front of a channel: a token bucket, then a delay line.

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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.messages.run import Credit, Heartbeat, ToPeer
from isthmus.runtime.transport.channel import CHUNK_BYTES, Channel, Payload, chunks, frame
from isthmus.training.layout import pack
from isthmus.training.stored import Sent, StoredTensor

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
    if (left_s := time_s - time.monotonic()) > 0:
        time.sleep(left_s)


FLUSH_S = 5.0  # for what was handed over when a lane ends


class PackedMessage(NamedTuple):
    message: AnyMessage
    payload: Payload
    sent: Callable[[], None] | None = None  # called when the payload's memory is not needed any more, in any thread


Packer = Callable[[], PackedMessage]
"""Makes what is sent of a message: its payload, and a header that says how it is packed. Called in the lane's packing
thread, in the order in which messages are handed over."""


Outgoing = tuple[AnyMessage, Sequence[Sent]]


class QueuedSend(msgspec.Struct, frozen=True):
    """When a message left: the start and end of its way onto the link, in seconds of the monotonic clock."""

    message: AnyMessage
    start_s: float
    end_s: float
    size_bytes: int  # bytes of its tensors, as they travel
    wire_bytes: int  # bytes of the whole frame


class Credits:
    """Bytes that may still be sent before the receiver says that it has taken some. Granted ahead.

    Why nothing waits for ever: the receiver keeps back less than a quarter of the window unsaid, so once it has taken
    all that arrived, what is left is less than a quarter, and then a message of any size goes. It can take all that
    arrived, because parcels are handed over in the order in which a stage needs them, item after item and micro-batch
    after micro-batch: what it waits for is never behind, on the same link, what it does not take yet.
    """

    def __init__(self, window_bytes: int) -> None:
        self.changed = threading.Condition()  # guards the credits, and the queue of the lane that they belong to
        self.given_s = 0.0  # when the receiver last said something
        self._window_bytes = window_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Sent, and not yet said to be taken: at most the window, or a quarter of it and one message."""
        return self._used_bytes

    def take(self, size_bytes: int) -> bool:
        """Count a message as sent if it may be; with `changed` held."""
        used = self._used_bytes
        if 4 * used > self._window_bytes and used + size_bytes > self._window_bytes:
            return False
        self._used_bytes += size_bytes
        return True

    def give(self, size_bytes: int) -> None:
        with self.changed:
            self._used_bytes = max(0, self._used_bytes - size_bytes)
            self.given_s = time.monotonic()
            self.changed.notify_all()


class _Entry(msgspec.Struct):
    message: AnyMessage
    tensors: Sequence[Sent]
    size_bytes: int  # bytes of the tensors as the receiver holds them: credits count these
    ready_s: float
    packed: Future[tuple[PackedMessage, float]] | None = None
    """The packed message and the time at which it was made; None sends the tensors from where they are."""
    blocked_s: float = 0.0  # since when it waits for credits, if it had to


class SendLane:
    """One link's queue of outgoing messages and the thread that sends them."""

    def __init__(
        self,
        channel: Channel,
        *,
        shape: Link | None = None,
        credits: Credits | None = None,
        timeout_s: float = 60.0,
        following: Callable[[], Outgoing | None] = lambda: None,
        on_departure: Callable[[QueuedSend], None] = lambda _: None,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """`shape` emulates a link; `credits` bound the parcels on the way. Callbacks run in the lane's threads.
        `following` is asked for a message when none waits; `wake` says that it may have one.

        `on_error` is called once at most, with what ended the lane: PeerError when the other side is gone, or has
        granted nothing for `timeout_s`. Whatever is handed over after that is dropped.
        """
        self._channel = channel
        self._link = ShapedLink(channel, shape, self._fail) if shape is not None else None
        self._credits = credits
        self._timeout_s = timeout_s
        self._following = following
        self._on_departure = on_departure
        self._on_error = on_error
        self._changed = credits.changed if credits is not None else threading.Condition()
        self._waiting: deque[_Entry] = deque()
        self._urgent: deque[_Entry] = deque()
        self._background: deque[_Entry] = deque()
        self._closing = self._ended = self._sending = False
        self._packing = ThreadPoolExecutor(1, thread_name_prefix=f"pack for {channel.other}")
        self._thread = threading.Thread(target=self._run, name=f"send to {channel.other}", daemon=True)
        self._thread.start()

    def put(
        self,
        message: AnyMessage,
        tensors: Sequence[Sent] = (),
        packer: Packer | None = None,
        *,
        background: bool = False,
    ) -> None:
        """Hand over a message; returns at once.

        The tensors are sent from where they lie in host memory or in files, or as what `packer` makes of them: they
        must not change until they have left. What a packer raises ends the lane.
        """
        size_bytes = sum(t.nbytes for t in tensors)
        entry = _Entry(message, () if packer else tensors, size_bytes, time.monotonic())
        with self._changed:
            if not self._ended:
                if packer is not None:
                    entry.packed = self._packing.submit(_timed, packer)
                queue = self._background if background else self._waiting
                (self._urgent if isinstance(message, Credit | Heartbeat) else queue).append(entry)
                self._changed.notify_all()

    def wake(self) -> None:
        """There may be a message to send that was not put."""
        with self._changed:
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Return whether a message is on its way, or waits to be."""
        return self._sending or bool(self._waiting)

    def withdraw(self, kind: type[msgspec.Struct]) -> None:
        """Forget messages whose body is of this type and that have not begun to leave."""
        with self._changed:
            self._waiting = deque(entry for entry in self._waiting if not isinstance(content(entry.message), kind))

    def reshape(self, shape: Link) -> None:
        """Emulation: what leaves from now on leaves on such a link."""
        assert self._link is not None, "only an emulated link has a shape"
        self._link.reshape(shape)

    def drain(self) -> None:
        """Wait until all that was handed over has left, or the lane has ended; give up after its timeout."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or not (self._waiting or self._urgent or self._sending), self._timeout_s
            )

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Send what was handed over, then end; give up after `flush_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(flush_s)
        self._end()

    def _run(self) -> None:
        try:
            while (entry := self._next()) is not None:
                self._send(entry)
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()
                del entry  # while it waits, the lane must not keep tensors alive
            if self._link is not None:
                self._link.close()
        except Exception as e:  # the lane's owner decides: a thread has no one to raise to
            self._fail(e)

    def _next(self) -> _Entry | None:
        """Wait for the next message that may go; None when the lane has ended."""
        with self._changed:
            while not self._ended:
                if self._urgent:
                    self._sending = True
                    return self._urgent.popleft()
                if self._waiting and self._admit(self._waiting[0]):
                    self._sending = True
                    return self._waiting.popleft()
                if not self._waiting and (found := self._following()) is not None:
                    self._sending = True
                    return _Entry(*found, 0, time.monotonic())
                if self._closing and not self._waiting:
                    return None
                if self._background:
                    self._sending = True
                    return self._background.popleft()
                if not self._waiting:
                    self._changed.wait()
                else:
                    self._wait_for_credits(self._waiting[0])
        return None

    def _admit(self, entry: _Entry) -> bool:
        if self._credits is None or not isinstance(entry.message, ToPeer):
            return True
        if not self._credits.take(entry.size_bytes):
            entry.blocked_s = entry.blocked_s or time.monotonic()
            return False
        if entry.blocked_s:  # it was ready when the room was granted, not when it was handed over
            entry.ready_s = max(entry.ready_s, self._credits.given_s)
        return True

    def _wait_for_credits(self, entry: _Entry) -> None:
        assert self._credits is not None, "only credits hold a message back"
        left_s = max(entry.blocked_s, self._credits.given_s) + self._timeout_s - time.monotonic()
        if left_s <= 0:
            raise PeerError(
                f"{self._channel.other}: accepted none of {self._credits.used_bytes} bytes for {self._timeout_s:g} s"
            )
        self._changed.wait(left_s)

    def _send(self, entry: _Entry) -> None:
        if entry.packed is None:
            message, payload, sent = PackedMessage(entry.message, [payload_of(t) for t in entry.tensors])
        else:
            (message, payload, sent), packed_s = entry.packed.result()
            entry.ready_s = max(entry.ready_s, packed_s)
        size_bytes = sum(p.nbytes for p in payload)
        if self._link is None:
            start_s = time.monotonic()
            wire_bytes = self._channel.send(message, payload)
            end_s = time.monotonic()
            if sent is not None:
                sent()
        else:
            pieces = frame(message, payload)
            wire_bytes = sum(p.nbytes for p in pieces)
            start_s, end_s = self._link.send(pieces, entry.ready_s, sent)
        self._on_departure(QueuedSend(message, start_s, end_s, size_bytes, wire_bytes))

    def _fail(self, error: Exception) -> None:
        if self._end():
            self._on_error(error)

    def _end(self) -> bool:
        """Drop what is queued; False when the lane had ended before."""
        with self._changed:
            ended, self._ended = self._ended, True
            self._waiting.clear()
            self._urgent.clear()
            self._background.clear()
            self._changed.notify_all()
        self._packing.shutdown(wait=False, cancel_futures=True)
        return not ended


def payload_of(tensor: Sent) -> memoryview | StoredTensor:
    return tensor if isinstance(tensor, StoredTensor) else pack(tensor)


def _timed(packer: Packer) -> tuple[PackedMessage, float]:
    return packer(), time.monotonic()
