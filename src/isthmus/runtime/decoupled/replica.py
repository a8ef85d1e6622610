"""A replica's process: it trains, and looks between two steps at what the merger sent. It never waits for the merger:
neither for a merge, nor for its connection, which another thread makes again."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.fleet import Link
from isthmus.protocol.decoupled_events import (
    NEVER,
    Contribute,
    Contributed,
    FragmentSent,
    LinkLost,
    ReplicaEvent,
    StepEnded,
    StepsMade,
    StopReplica,
    Train,
    VersionTaken,
)
from isthmus.protocol.decoupled_replica import DecoupledReplica
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.decoupled.outgoing import Outgoing, OutgoingLink
from isthmus.runtime.decoupled.trainer import ReplicaTrainer
from isthmus.runtime.messages.decoupled import FromReplica, ToReplica
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.transport.channel import dial
from isthmus.runtime.transport.message_sender import PER_TIMEOUT
from isthmus.runtime.transport.shaping import sleep_until
from isthmus.training.layout import header_of

REDIAL_S = 1.0
EXIT_GRACE_S = 10.0
"""For what is on its way when a replica ends."""
Received = tuple[ReplicaEvent, list[Tensor]]


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


class MergerLink:
    """The connection to the merger, which is made again whenever it is lost. Any thread may put."""

    def __init__(self, place: ReplicaPlace) -> None:
        self._place = place
        self.received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._connection: tuple[deque[Outgoing], OutgoingLink] | None = None
        """What waits to be sent over it."""
        self._over = threading.Event()
        threading.Thread(target=self._live, name="connect to merger", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def put(self, body: StepsMade | Contributed | DeviceFailed, tensors: list[Tensor] | None = None) -> None:
        """Send it, when the link is free; what is put while there is no connection is dropped."""
        headers = tuple(header_of(f"delta {n}", t) for n, t in enumerate(tensors or []))
        self._put((FromReplica(run=self._place.run, body=body, tensors=headers), tensors or []))

    def close(self) -> None:
        """Send what waits, and end."""
        self._over.set()
        if (connection := self._connection) is not None:
            connection[1].finish(EXIT_GRACE_S)

    def _put(self, message: Outgoing) -> None:
        if (connection := self._connection) is not None:
            waiting, outgoing = connection
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
                self.received.put((LinkLost(), []))
            self._over.wait(REDIAL_S)

    def _connect(self) -> None:
        """Receive until the connection ends."""
        place = self._place
        host, _, port = place.address.rpartition(":")
        channel = dial(host, int(port), "merger", place.timeout_s)
        join = JoinRun(run=place.run, device=place.name, host="", port=0)
        waiting = deque[Outgoing]([(join, [])])
        outgoing = OutgoingLink(channel, place.link, lambda: waiting.popleft() if waiting else None)
        self._connection = waiting, outgoing
        try:
            outgoing.wake()
            while (received := channel.receive(idle_s=place.timeout_s)) is not None:
                message, tensors = received
                if isinstance(message, ToReplica):
                    self.received.put((message.body, tensors))
            raise PeerError("merger: closed the connection")
        finally:
            self._connection = None
            outgoing.finish(0.0)
            channel.close()


class ReplicaProcess:
    """Drives the machine: its instructions are carried out in this thread, between two steps."""

    def __init__(self, trainer: ReplicaTrainer, place: ReplicaPlace, fragments: int) -> None:
        self._machine = DecoupledReplica(fragments, trainer.batch)
        self._trainer, self._place = trainer, place
        self._link = MergerLink(place)
        self._taken: list[VersionTaken] = []
        """Since the newest contribution that is known to be merged."""
        self._taken_before = 0
        """How many came before those."""
        self._reported = (NEVER, 0)
        """The newest contribution, and how many versions had been taken until then."""
        self._train: Train | None = None
        self._over = False

    def run(self) -> None:
        """Until the run is over. The merger gets the error of training, which is then raised."""
        try:
            while not self._over:
                if (train := self._train) is None:
                    self._receive(wait=True)
                else:
                    self._train = None
                    self._step(train)
        except Exception as e:
            reason = str(e) if isinstance(e, IsthmusError) else f"{type(e).__name__}: {e}"
            fault = "user" if isinstance(e, UserError) else "device"
            self._link.put(DeviceFailed(reason=" ".join(reason.split())[:500], fault=fault))
            raise
        finally:
            self._link.close()

    def _receive(self, *, wait: bool) -> None:
        """What came, up to the next step's beginning; if `wait`, also what is yet to come. What comes after a step's
        learning rate is known waits for the step's end: the record could not say that it came before."""
        while self._train is None and not self._over and (wait or not self._link.received.empty()):
            self._handle(*self._link.received.get())

    def _step(self, train: Train) -> None:
        began_s = time.monotonic()
        loss = self._trainer.step(train.samples)
        sleep_until(began_s + self._place.step_s)
        self._receive(wait=False)
        if not self._over:
            self._handle(StepEnded(samples=self._trainer.samples, loss=loss if math.isfinite(loss) else None), [])

    def _handle(self, event: ReplicaEvent, tensors: list[Tensor]) -> None:
        for instruction in self._machine.handle(event):
            match instruction:
                case FragmentSent():
                    self._take(instruction, tensors)
                case Contribute():
                    self._contribute(instruction)
                case StepsMade():
                    self._link.put(instruction)
                case Train():
                    self._train = instruction
                case StopReplica():
                    self._over = True

    def _take(self, sent: FragmentSent, tensors: list[Tensor]) -> None:
        (values,) = tensors
        self._trainer.fragments.take(sent.fragment, values, whole=sent.whole, included=sent.included, first=sent.first)
        self._taken.append(VersionTaken(fragment=sent.fragment, merge=sent.merge, steps=self._trainer.steps))
        self._forget(sent.included)

    def _forget(self, included: int) -> None:
        """Versions that a merged contribution has named."""
        merge, count = self._reported
        if merge == included != NEVER:
            del self._taken[: count - self._taken_before]
            self._taken_before = count

    def _contribute(self, asked: Contribute) -> None:
        own, collect = self._trainer.fragments, asked.collect
        fragments = tuple(f for f in collect.fragments if collect.last or not own.waits(f))
        if not fragments:
            return
        payloads = [own.give(fragment, collect.merge) for fragment in fragments]
        body = Contributed(
            merge=collect.merge,
            fragments=fragments,
            steps=self._trainer.steps,
            samples=tuple(own.samples(fragment) for fragment in fragments),
            taken=tuple(self._taken),
            taken_before=self._taken_before,
        )
        self._reported = (collect.merge, self._taken_before + len(self._taken))
        self._link.put(body, payloads)


def serve_replica(prepare: Callable[[], ReplicaTrainer], place: ReplicaPlace, fragments: int) -> None:
    """Train as one replica until the merger ends the run."""
    ReplicaProcess(prepare(), place, fragments).run()
