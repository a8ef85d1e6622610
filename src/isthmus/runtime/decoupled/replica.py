"""A replica that has all of its weights: it trains, and looks between two steps at what the merger sent. It never waits
for the merger: neither for a merge, nor for its connection, which another thread makes again."""

from __future__ import annotations

import math
import time
from typing import Protocol

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.protocol.decoupled_events import CollectChanges, FragmentSent, LastStepMade, StepsMade
from isthmus.protocol.decoupled_replica import DecoupledReplica
from isthmus.protocol.run_messages import Halt
from isthmus.runtime.decoupled.merger_link import MergerLink, Received, TakenVersions, check_received
from isthmus.runtime.transport.shaping import sleep_until
from isthmus.training.decoupled import ReplicaFragments


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
        own = self._fragments
        fragments = own.account.due(collect.fragments, last=collect.last)
        if not fragments and not collect.last:
            return
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
