"""The coordinator's way to an actor and back: frames as calls of the actor, and as what its `run` yields."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from isthmus.errors import PeerError
from isthmus.protocol.federated_messages import PhaseId, PhaseOpened
from isthmus.protocol.state_homes import StateHomes
from isthmus.runtime.federated.ray_actor import ExecutorActor
from isthmus.runtime.federated.ray_frames import Payload, frame_bytes, ray_frame, received
from isthmus.runtime.launchers.ray_connection import ray_library
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.transport.channel import ChannelStatistics, Guard, Received

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

INLINE_BYTES = 64 << 10
"""Up to here a frame carries its tensors itself. Ray does so with what a call carries up to 100 kB."""


class RayBroadcast:
    """A phase's broadcast in Ray's object store: written once, sent once to each node, mapped by its actors."""

    def __init__(self) -> None:
        self._phase: PhaseId | None = None
        self._kept: ObjectRef[Payload] | None = None
        self._writing = threading.Lock()

    def put(self, phase: PhaseId, payload: Payload) -> ObjectRef[Payload]:
        """The phase's object; that of the phase before goes when nobody reads it any more."""
        with self._writing:
            if (kept := self._kept) is None or phase != self._phase:
                kept = self._kept = ray_library().put(payload)
                self._phase = phase
            return kept


class RayChannel:
    """A `MessageChannel` to one actor, which ends with it."""

    def __init__(
        self,
        other: str,
        actor: ActorHandle[ExecutorActor],
        broadcast: RayBroadcast,
        homes: StateHomes | None,
        peers: Sequence[ActorHandle[ExecutorActor]],
    ) -> None:
        """The actor begins."""
        self.other = other
        self.moved_bytes = 0
        """Bytes of states that came to the actor from other nodes."""
        self.lost: str | None = None
        """How the actor was lost."""
        self._actor = actor
        self._broadcast = broadcast
        self._frames: Iterator[ObjectRef[tuple[bytes, Payload, int]]] = actor.run.options(
            num_returns="streaming"
        ).remote(msgspec.msgpack.encode(homes), peers)
        self._deliver = actor.deliver.options(num_returns=0)
        self._number = 0
        self._closed = threading.Event()
        self._sent = self._received = 0

    def send(self, message: AnyMessage, payload: Sequence[memoryview] = ()) -> int:
        header, parts = frame = ray_frame(message, payload)
        number, size_bytes = self._number, frame_bytes(frame)
        body = content(message)
        if isinstance(body, PhaseOpened) and size_bytes > INLINE_BYTES:
            self._deliver.remote(number, header, self._broadcast.put(body.opening.phase, parts))
        else:
            self._deliver.remote(number, header, parts)
        self._number += 1
        self._sent += size_bytes
        return size_bytes

    def receive(self, guard: Guard | None = None, idle_s: float | None = None) -> Received | None:
        ray = ray_library()
        try:
            if not ray.wait([self._frames], timeout=idle_s)[0]:
                raise PeerError(f"{self.other}: silent for {idle_s:g} s")
            header, payload, self.moved_bytes = ray.get(next(self._frames))
        except StopIteration:
            return None
        except ray.exceptions.RayError as e:
            if self._closed.is_set():
                return None
            self.lost = lost_by(e)
            raise PeerError(f"{self.other}: {self.lost}") from None
        self._received += frame_bytes((header, payload))
        try:
            return received((header, payload), guard)
        except PeerError as e:
            raise PeerError(f"{self.other}: {e}") from None

    def close(self) -> None:
        """Kills the actor."""
        if not self._closed.is_set():
            self._closed.set()
            ray = ray_library()
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actor)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._sent, self._received)


def lost_by(error: Exception) -> str:
    """Return how an actor was lost, in one line and without Ray's advice."""
    ray, text = ray_library(), " ".join(str(error).split())
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"its actor failed: {getattr(error, 'cause', error)}"
    if "its node has died" in text:
        return "its node was lost"
    if "worker process has died" in text:
        return "its actor's process ended unexpectedly"
    return f"its actor ended: {text[:200]}"
