"""A replica's connection to the merger, which is made again whenever it is lost; and the versions that it took."""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isthmus.errors import PeerError
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
from isthmus.runtime.identity import Identity
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.decoupled import FromReplica, ReplicaNote, ToReplica, TrainReplica
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport.lanes import sleep_until
from isthmus.runtime.transport.reconnection import (
    CoordinatorConnection,
    CoordinatorGone,
    Outage,
    Retry,
    dial_lane,
    reporting,
)
from isthmus.training.decoupled import ReplicaFragments
from isthmus.training.layout import header_of

EXIT_GRACE_S = 10.0
"""For what is on its way when a replica ends; and for a connection over which its error goes: on a busy machine the
first one takes seconds."""
Received = tuple[ReplicaOrder | None, list[Tensor]]
"""An order of the merger, and what came with it; None where the connection is lost."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPlace:
    """Where a replica is, and how slow its link is made."""

    name: str
    run: str  # the run's secret name
    address: str  # HOST:PORT of the merger
    timeout_s: float
    link: Link | None = None  # emulated, to the merger
    identity: Identity | None = None  # the identity of a device that joined a fleet: its coordinator has the merger
    away_timeout_s: float = math.inf  # where the merger cannot be reached for longer, the replica ends


class MergerLink:
    """The connection to the merger, which is made again whenever it is lost. Any thread may put."""

    def __init__(self, place: ReplicaPlace) -> None:
        self._place = place
        self.received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._assigned: queue.SimpleQueue[tuple[TrainReplica, list[Tensor]] | None] = queue.SimpleQueue()
        self._was_assigned = False
        host, _, port = place.address.rpartition(":")
        self._connection = CoordinatorConnection(
            lambda: dial_lane((host, int(port)), "merger", place.timeout_s, place.identity, place.link),
            lambda: JoinRun(run=place.run, device=place.name, host="", port=0),
            run=place.run,
            timeout_s=place.timeout_s,
            retry=Retry(away_s=place.away_timeout_s),
            on_lost=self._lost,
        )
        threading.Thread(target=self._receive, name="connect to merger", daemon=True).start()

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
        self._connection.put(FromReplica(run=self._place.run, body=body, tensors=headers), tensors or [])

    @contextlib.contextmanager
    def reporting(self) -> Generator[None]:
        """Errors of the block reach the merger before they are raised. The connection ends with the block."""
        try:
            with reporting(self._report):
                yield
        finally:
            self.close()

    def refuse(self, error: PeerError) -> None:
        """Hang up on a merger that said what none says. It is dialled again, and then sends everything anew."""
        self._say(f"{error}; dialling it again")
        if (connection := self._connection.current) is not None:
            connection.channel.close()

    def refuse_order(self, error: PeerError) -> None:
        """Refuse what came first: it is said again on the next connection, and all that follows it."""
        while not self.received.empty():
            self.received.get()
        self._was_assigned = False
        self.refuse(error)

    def close(self, grace_s: float = EXIT_GRACE_S) -> None:
        """Send what waits, but take no longer than this, and end."""
        self._connection.close(grace_s)

    def _report(self, failed: DeviceFailed) -> None:
        self._connection.connected.wait(EXIT_GRACE_S)  # it may fail sooner than it is connected
        self.put(failed)

    def _say(self, text: str) -> None:
        print(f"replica {self._place.name}: merger: {text}", file=sys.stderr, flush=True)

    def _lost(self, outage: Outage) -> None:
        self.received.put((None, []))
        if outage.log:
            self._say(f"no message for {outage.silent_s:.0f} s: {outage.error}")

    def _receive(self) -> None:
        try:
            self._connection.serve(lambda connection: connection.receive(self._on_message))
        except CoordinatorGone:
            self._assigned.put(None)
            self.received.put((Halt(), []))

    def _on_message(self, message: AnyMessage, tensors: list[Tensor]) -> None:
        if isinstance(message, ToReplica):
            self.received.put((message.body, tensors))
        elif isinstance(message, TrainReplica) and not self._was_assigned:
            self._was_assigned = True
            self._assigned.put((message, tensors))


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
        self._taken: list[VersionTaken] = []  # since the newest contribution that is known to be merged
        self._before = 0  # how many came before those
        self._reported = (NEVER, 0)  # the newest contribution, and how many versions had been taken until then

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
            last=collect.last,
            taken=tuple(self._taken),
            taken_before=self._before,
        )


class WholeTrainer(Protocol):
    """The steps of one replica of a job, on the whole model."""

    samples: int  # samples of a step
    batch: int  # samples of a step of all replicas together
    steps: int  # that were made
    fragments: ReplicaFragments

    def step(self, samples: int) -> float:
        """One step, where all replicas had trained on so many samples; returns the loss."""
        ...


class ReplicaHost:
    """The port of one replica: what it asks is carried out in the calling thread, between two steps."""

    def __init__(self, fragments: ReplicaFragments, per_step: int, link: MergerLink, steps: int = 0) -> None:
        """`per_step`: samples of all replicas in a step of each; `steps` were made by an earlier process."""
        self.link = link
        self.sent_bytes = 0  # bytes of contributions
        self.samples = 0  # samples of all replicas before the next step, as far as this one knows
        self.halted = False  # whether the merger has ended the run
        self._machine = DecoupledReplica(fragments.count, per_step, steps)
        self._machine.port = self
        self._values: list[Tensor] = []  # values that came with the order that is being taken
        self._fragments = fragments
        self._taken = TakenVersions()
        self._steps = steps
        self._next: int | None = None  # samples of all replicas before the next step, if there is one
        self._lost_at_s: float | None = None

    @property
    def phase(self) -> str:
        """Return the phase of `DecoupledReplica`."""
        return self._machine.phase

    @property
    def unreachable_s(self) -> float:
        """For how long the merger has not been reached, as far as this thread has heard."""
        return 0.0 if self._lost_at_s is None else time.monotonic() - self._lost_at_s

    def receive(self, give_up_s: float = math.inf) -> int | None:
        """Wait for the next step, and return the samples of all replicas before it. None when the run is over, or when
        the merger cannot be reached for `give_up_s`."""
        while self._next is None and self.phase != "over" and self.unreachable_s <= give_up_s:
            self._receive(self.link.received.get())
        return self._next

    def stepped(self, samples: int, loss: float | None = None) -> None:
        """A step was made. What came during it counts as come before its end: the record could not say that it came
        before the learning rate was known."""
        self._steps, self._next = self._steps + 1, None
        while not self.link.received.empty():
            self._receive(self.link.received.get())
        finite = loss is not None and math.isfinite(loss)
        if self.phase == "training":
            self._machine.step_ended(samples, loss if finite else None)

    def last_step_made(self) -> None:
        """Note that this replica has made its last step: it goes on giving contributions until the run is over."""
        self._next = None
        if self.phase == "training":
            self._machine.last_step_made()

    def _receive(self, received: Received) -> None:
        """Take a message of the merger; hang up on a merger that sent an invalid one."""
        try:
            check_received(self._machine, received, self._fragments.elements)
            self._ordered(received)
        except PeerError as e:
            self.link.refuse(e)

    def _ordered(self, received: Received) -> None:
        order, self._values = received
        if order is None:
            self._lost_at_s = self._lost_at_s or time.monotonic()
        elif self._values or isinstance(order, Halt):
            self._lost_at_s = None
        self.halted |= isinstance(order, Halt)
        self._machine.ordered(order)

    # What the replica asks

    def take(self, sent: FragmentSent) -> None:
        (values,) = self._values
        self._fragments.take(sent.fragment, values, whole=sent.whole, included=sent.included, first=sent.first)
        self._taken.add(sent, self._steps)

    def train(self, samples: int) -> None:
        self._next = self.samples = samples

    def say(self, body: StepsMade | LastStepMade) -> None:
        self.link.put(body)

    def stop(self) -> None:
        self._next = None

    def contribute(self, collect: CollectChanges) -> None:
        fragments = self._fragments.account.due(collect.fragments, last=collect.last)
        if fragments or collect.last:
            self._give(collect, fragments)

    def _give(self, collect: CollectChanges, fragments: Sequence[int]) -> None:
        """Give the changes of these fragments, by the weights that the process has."""
        own = self._fragments
        payloads = [own.give(fragment, collect.merge) for fragment in fragments]
        samples = [own.account.samples(fragment) for fragment in fragments]
        self.link.put(self._taken.contributed(collect, fragments, self._steps, samples), payloads)
        self.sent_bytes += sum(payload.nbytes for payload in payloads)


def train_replica(trainer: WholeTrainer, link: MergerLink, step_s: float = 0.0) -> None:
    """Until the merger ends the run. A step takes `step_s` at least."""
    replica = ReplicaHost(trainer.fragments, trainer.batch, link, trainer.steps)
    while (samples := replica.receive()) is not None:
        began_s = time.monotonic()
        loss = trainer.step(samples)
        sleep_until(began_s + step_s)
        replica.stepped(trainer.samples, loss)
