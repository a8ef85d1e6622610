"""A replica's process: it trains, and looks between two steps at what the merger sent. It never waits for the merger:
neither for a merge, nor for its connection, which another thread makes again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from isthmus.protocol.decoupled_events import (
    Contribute,
    FragmentSent,
    ReplicaEvent,
    StepEnded,
    StepsMade,
    StopReplica,
    Train,
)
from isthmus.protocol.decoupled_replica import DecoupledReplica
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace, TakenVersions
from isthmus.runtime.transport.shaping import sleep_until
from isthmus.training.decoupled import ReplicaFragments


class Trainer(Protocol):
    """The steps of one replica on the whole model."""

    samples: int
    """Of a step."""
    batch: int
    """Of a step of each replica."""
    steps: int
    """That were made."""
    fragments: ReplicaFragments

    def step(self, samples: int) -> float:
        """One step, where all replicas had trained on so many samples; returns the loss."""
        ...


class ReplicaProcess:
    """Drives the machine: its instructions are carried out in this thread, between two steps."""

    def __init__(self, trainer: Trainer, link: MergerLink, fragments: int, step_s: float = 0.0) -> None:
        """A step takes `step_s` at least."""
        self._machine = DecoupledReplica(fragments, trainer.batch, trainer.steps)
        self._trainer, self._link, self._step_s = trainer, link, step_s
        self._taken = TakenVersions()
        self._train: Train | None = None
        self._over = False

    def run(self) -> None:
        """Until the run is over."""
        while not self._over:
            if (train := self._train) is None:
                self._receive(wait=True)
            else:
                self._train = None
                self._step(train)

    def _receive(self, *, wait: bool) -> None:
        """What came, up to the next step's beginning; if `wait`, also what is yet to come. What comes after a step's
        learning rate is known waits for the step's end: the record could not say that it came before."""
        while self._train is None and not self._over and (wait or not self._link.received.empty()):
            self._handle(*self._link.received.get())

    def _step(self, train: Train) -> None:
        began_s = time.monotonic()
        loss = self._trainer.step(train.samples)
        sleep_until(began_s + self._step_s)
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
        self._taken.add(sent, self._trainer.steps)

    def _contribute(self, asked: Contribute) -> None:
        own, collect = self._trainer.fragments, asked.collect
        fragments = own.account.due(collect.fragments, last=collect.last)
        if not fragments:
            return
        payloads = [own.give(fragment, collect.merge) for fragment in fragments]
        samples = [own.account.samples(fragment) for fragment in fragments]
        self._link.put(self._taken.contributed(collect, fragments, self._trainer.steps, samples), payloads)


def serve_replica(prepare: Callable[[], Trainer], place: ReplicaPlace, fragments: int) -> None:
    """Train as one replica until the merger ends the run. The merger gets the error of training, which is then
    raised."""
    trainer, link = prepare(), MergerLink(place)
    with link.reporting():
        ReplicaProcess(trainer, link, fragments, place.step_s).run()
