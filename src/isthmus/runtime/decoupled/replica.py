"""A replica that has all of its weights: it trains, and looks between two steps at what the merger sent. It never waits
for the merger: neither for a merge, nor for its connection, which another thread makes again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.protocol.decoupled_events import (
    Contribute,
    FragmentSent,
    LastStepMade,
    LinkLost,
    StepEnded,
    StepsMade,
    StopReplica,
    Train,
)
from isthmus.protocol.decoupled_replica import DecoupledReplica, Phase
from isthmus.protocol.run_messages import Halt
from isthmus.runtime.decoupled.merger_link import MergerLink, Received, ReplicaPlace, TakenVersions, check_received
from isthmus.runtime.decoupled.together import Trainer
from isthmus.runtime.transport.shaping import sleep_until
from isthmus.training.decoupled import ReplicaFragments


class WholeTrainer(Trainer, Protocol):
    """The steps of one replica of a job, on the whole model."""

    samples: int
    """Of a step."""
    batch: int
    """Of a step of each replica."""


class ReplicaHost:
    """Drives the machine: its instructions are carried out in the calling thread, between two steps."""

    def __init__(self, fragments: ReplicaFragments, per_step: int, link: MergerLink, steps: int = 0) -> None:
        """`per_step`: samples of all replicas in a step of each; `steps` were made by an earlier process."""
        self.link = link
        self.sent_bytes = 0
        """Of contributions."""
        self.samples = 0
        """Of all replicas before the next step, as far as this one knows."""
        self.halted = False
        """Whether the merger has ended the run."""
        self._machine = DecoupledReplica(fragments.count, per_step, steps)
        self._fragments = fragments
        self._taken = TakenVersions()
        self._steps = steps
        self._train: Train | None = None
        self._lost_at_s: float | None = None

    @property
    def phase(self) -> Phase:
        """Of the machine."""
        return self._machine.phase

    @property
    def unreachable_s(self) -> float:
        """For how long the merger has not been reached, as far as this thread has heard."""
        return 0.0 if self._lost_at_s is None else time.monotonic() - self._lost_at_s

    def receive(self, give_up_s: float = math.inf) -> Train | None:
        """The next step. None when the run is over; until then this waits, but no longer than `give_up_s` for a merger
        that cannot be reached."""
        while self._train is None and self.phase != "over" and self.unreachable_s <= give_up_s:
            self._receive(self.link.received.get())
        return self._train

    def stepped(self, samples: int, loss: float | None = None) -> None:
        """A step was made. What came during it counts as come before its end: the record could not say that it came
        before the learning rate was known."""
        self._steps, self._train = self._steps + 1, None
        while not self.link.received.empty():
            self._receive(self.link.received.get())
        finite = loss is not None and math.isfinite(loss)
        self._handle((StepEnded(samples=samples, loss=loss if finite else None), []))

    def last_step_made(self) -> None:
        """Of this replica: it goes on giving what it has until the run is over."""
        self._train = None
        if self.phase == "training":
            self._handle((LastStepMade(), []))

    def _receive(self, received: Received) -> None:
        """Of the merger: hang up on one that says what none can."""
        try:
            check_received(self._machine, received, self._fragments.elements)
            self._handle(received)
        except PeerError as e:
            self.link.refuse(e)

    def _handle(self, received: Received) -> None:
        event, tensors = received
        if isinstance(event, LinkLost):
            self._lost_at_s = self._lost_at_s or time.monotonic()
        elif tensors or isinstance(event, Halt):
            self._lost_at_s = None
        self.halted |= isinstance(event, Halt)
        for instruction in self._machine.handle(event):
            match instruction:
                case FragmentSent():
                    self._take(instruction, tensors)
                case Contribute():
                    self._contribute(instruction)
                case StepsMade() | LastStepMade():
                    self.link.put(instruction)
                case Train():
                    self._train, self.samples = instruction, instruction.samples
                case StopReplica():
                    self._train = None

    def _take(self, sent: FragmentSent, tensors: list[Tensor]) -> None:
        (values,) = tensors
        self._fragments.take(sent.fragment, values, whole=sent.whole, included=sent.included, first=sent.first)
        self._taken.add(sent, self._steps)

    def _contribute(self, asked: Contribute) -> None:
        own, collect = self._fragments, asked.collect
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
    while (train := replica.receive()) is not None:
        began_s = time.monotonic()
        loss = trainer.step(train.samples)
        sleep_until(began_s + step_s)
        replica.stepped(trainer.samples, loss)


def serve_replica(prepare: Callable[[], WholeTrainer], place: ReplicaPlace) -> None:
    """Train as one replica until the merger ends the run. The merger gets an error, also of preparing, which is then
    raised."""
    link = MergerLink(place)
    with link.reporting():
        train_replica(prepare(), link, place.step_s)
