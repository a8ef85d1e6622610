"""A replica's connection to the merger, which is made again whenever it is lost; and the versions that it took."""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.fleet import Link
from isthmus.protocol.decoupled_events import (
    NEVER,
    CollectChanges,
    Contributed,
    FragmentSent,
    LastStepMade,
    ReplicaOrder,
    StepsMade,
    VersionTaken,
)
from isthmus.protocol.decoupled_replica import DecoupledReplica
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.runtime.decoupled.outgoing import Outgoing, OutgoingLink
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.decoupled import FromReplica, ReplicaNote, ToReplica, TrainReplica
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.transport.channel import MAX_ASSIGNMENT_BYTES, SocketChannel, dial
from isthmus.runtime.transport.message_sender import PER_TIMEOUT
from isthmus.training.layout import header_of

REDIAL_S = 1.0
FIRST_S, POLL_S = 2.0, 0.02
"""For a connection over which an error goes; between looks for it."""
EXIT_GRACE_S = 10.0
"""For what is on its way when a replica ends."""
Received = tuple[ReplicaOrder | None, list[Tensor]]
"""An order of the merger, and what came with it; None where the connection is lost."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPlace:
    """Where a replica is, and how slow its device and its link are made."""

    name: str
    run: str
    """The run's secret name."""
    address: str
    """HOST:PORT of the merger."""
    timeout_s: float
    step_s: float = 0.0
    """A step takes no less."""
    link: Link | None = None
    """Emulated, to the merger."""
    identity: Identity | None = None
    """The identity of a device that joined a fleet: its coordinator has the merger."""
    away_timeout_s: float = math.inf
    """Where the merger cannot be reached for longer, the replica ends."""


class MergerLink:
    """The connection to the merger, which is made again whenever it is lost. Any thread may put."""

    def __init__(self, place: ReplicaPlace) -> None:
        self._place = place
        self.received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._assigned: queue.SimpleQueue[tuple[TrainReplica, list[Tensor]] | None] = queue.SimpleQueue()
        self._was_assigned = False
        self._heard_s = time.monotonic()
        self._connection: tuple[deque[Outgoing], OutgoingLink, SocketChannel] | None = None
        """Messages that wait to be sent, the link that sends them, and its channel."""
        self._over = threading.Event()
        threading.Thread(target=self._live, name="connect to merger", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def assigned(self) -> tuple[TrainReplica, list[Tensor]]:
        """Wait for the merger's first message to a device that joined. PeerError where it cannot be reached."""
        if (found := self._assigned.get()) is None:
            raise PeerError("merger: cannot be reached")
        return found

    def put(
        self,
        body: StepsMade | Contributed | LastStepMade | DeviceFailed | ReplicaNote,
        tensors: list[Tensor] | None = None,
    ) -> None:
        """Send it, when the link is free; what is put while there is no connection is dropped."""
        headers = tuple(header_of(f"delta {n}", t) for n, t in enumerate(tensors or []))
        self._put((FromReplica(run=self._place.run, body=body, tensors=headers), tensors or []))

    @contextlib.contextmanager
    def reporting(self) -> Generator[None]:
        """Errors of the block reach the merger before they are raised. The connection ends with the block."""
        try:
            yield
        except Exception as e:
            reason = str(e) if isinstance(e, IsthmusError) else f"{type(e).__name__}: {e}"
            fault = "user" if isinstance(e, UserError) else "device"
            give_up_s = time.monotonic() + FIRST_S
            while self._connection is None and time.monotonic() < give_up_s:  # it failed sooner than it was connected
                time.sleep(POLL_S)
            self.put(DeviceFailed(reason=" ".join(reason.split())[:500], fault=fault))
            raise
        finally:
            self.close()

    def refuse(self, error: PeerError) -> None:
        """Hang up on a merger that said what none says. It is dialled again, and then sends everything anew."""
        print(f"replica {self._place.name}: merger: {error}; dialling it again", file=sys.stderr, flush=True)
        if (connection := self._connection) is not None:
            connection[2].close()

    def refuse_order(self, error: PeerError) -> None:
        """As `refuse`, of what came first: it is said again on the next connection, and all that follows it."""
        while not self.received.empty():
            self.received.get()
        self._was_assigned = False
        self.refuse(error)

    def close(self, grace_s: float = EXIT_GRACE_S) -> None:
        """Send what waits, but take no longer than this, and end."""
        self._over.set()
        if (connection := self._connection) is not None:
            connection[1].finish(grace_s)
            connection[2].close()

    def _put(self, message: Outgoing) -> None:
        if (connection := self._connection) is not None:
            waiting, outgoing, _ = connection
            waiting.append(message)
            outgoing.wake()

    def _beat(self) -> None:
        while not self._over.wait(self._place.timeout_s / PER_TIMEOUT):
            self._put((Heartbeat(run=self._place.run), []))

    def _live(self) -> None:
        while not self._over.is_set():
            try:
                self._connect()
            except PeerError:
                self.received.put((None, []))
            if time.monotonic() - self._heard_s > self._place.away_timeout_s:
                self._assigned.put(None)
                self.received.put((Halt(), []))
                return
            self._over.wait(REDIAL_S)

    def _connect(self) -> None:
        """Receive until the connection ends."""
        place = self._place
        host, _, port = place.address.rpartition(":")
        channel = dial(
            host,
            int(port),
            "merger",
            place.timeout_s,
            identity=place.identity,
            expected=Party("coordinator", ""),
            most_header_bytes=MAX_ASSIGNMENT_BYTES,
        )
        join = JoinRun(run=place.run, device=place.name, host="", port=0)
        waiting = deque[Outgoing]([(join, [])])
        outgoing = OutgoingLink(channel, place.link, lambda: waiting.popleft() if waiting else None)
        self._connection = waiting, outgoing, channel
        try:
            outgoing.wake()
            while (received := channel.receive(idle_s=place.timeout_s)) is not None:
                message, tensors = received
                self._heard_s = time.monotonic()
                if isinstance(message, ToReplica):
                    self.received.put((message.body, tensors))
                elif isinstance(message, TrainReplica) and not self._was_assigned:
                    self._was_assigned = True
                    self._assigned.put((message, tensors))
            raise PeerError("merger: closed the connection")
        finally:
            self._connection = None
            outgoing.finish(0.0)
            channel.close()


def check_received(machine: DecoupledReplica, received: Received, elements: Sequence[int]) -> None:
    """Say it before `ordered`. PeerError for what no merger of this run sends; `elements` are those of each
    fragment. Payloads are checked when they are decoded, before anything is changed."""
    event, tensors = received
    if isinstance(event, CollectChanges | FragmentSent):
        machine.check(event)
    stated = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    if len(tensors) != isinstance(event, FragmentSent):
        raise PeerError(f"sent {type(event).__name__} with {len(tensors)} tensors")
    if isinstance(event, FragmentSent) and event.whole and stated != [(torch.float32, (elements[event.fragment],))]:
        raise PeerError(f"sent fragment {event.fragment} as {stated}, expected {elements[event.fragment]} floats")


class TakenVersions:
    """The versions that a replica took, as its contributions name them."""

    def __init__(self) -> None:
        self._taken: list[VersionTaken] = []
        """Since the newest contribution that is known to be merged."""
        self._before = 0
        """How many came before those."""
        self._reported = (NEVER, 0)
        """The newest contribution, and how many versions had been taken until then."""

    def add(self, sent: FragmentSent, steps: int) -> None:
        """After so many steps. Versions that a merged contribution has named are forgotten."""
        self._taken.append(VersionTaken(fragment=sent.fragment, merge=sent.merge, steps=steps))
        merge, count = self._reported
        if merge == sent.included != NEVER:
            del self._taken[: count - self._before]
            self._before = count

    def contributed(
        self, collect: CollectChanges, fragments: Sequence[int], steps: int, samples: Sequence[int]
    ) -> Contributed:
        """To these fragments, after so many steps: samples of each."""
        self._reported = (collect.merge, self._before + len(self._taken))
        return Contributed(
            merge=collect.merge,
            fragments=tuple(fragments),
            steps=steps,
            samples=tuple(samples),
            taken=tuple(self._taken),
            taken_before=self._before,
        )
