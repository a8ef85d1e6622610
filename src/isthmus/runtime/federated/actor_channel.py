"""An actor's end of the frames between it and the coordinator."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from typing import NamedTuple

from isthmus.errors import PeerError
from isthmus.runtime.federated.ray_frames import RayFrame, frame_bytes, ray_frame, received
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.transport.channel import ChannelStatistics, Guard, Received


class _Outgoing(NamedTuple):
    frame: RayFrame
    taken: threading.Event


class ActorChannel:
    """A `MessageChannel` to the coordinator. Calls of an actor may come in another order than they were made in: each
    frame has a number."""

    other = "coordinator"

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[RayFrame | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._early: dict[int, RayFrame] = {}
        self._next = 0
        self._ordering = threading.Lock()
        self._closed = threading.Event()
        self._sent = self._received = 0

    def deliver(self, number: int, frame: RayFrame) -> None:
        with self._ordering:
            self._early[number] = frame
            while (following := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._incoming.put(following)

    def frames(self) -> Generator[RayFrame]:
        """Yield the frames that are sent, until the channel is closed. Ray has copied a frame when the next one is
        asked for."""
        while (one := self._outgoing.get()) is not None:
            yield one.frame
            one.taken.set()

    def send(self, message: AnyMessage, payload: Sequence[memoryview] = ()) -> int:
        if self._closed.is_set():
            raise PeerError("coordinator: the connection is closed")
        one = _Outgoing(ray_frame(message, payload), threading.Event())
        self._outgoing.put(one)
        self._sent += frame_bytes(one.frame)
        if payload:
            one.taken.wait()  # its memory is used again
        return frame_bytes(one.frame)

    def receive(self, guard: Guard | None = None, idle_s: float | None = None) -> Received | None:
        try:
            frame = self._incoming.get(timeout=idle_s)
        except queue.Empty:
            raise PeerError(f"coordinator: silent for {idle_s:g} s") from None
        if frame is None:
            return None
        self._received += frame_bytes(frame)
        return received(frame, guard)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._incoming.put(None)
            self._outgoing.put(None)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._sent, self._received)
