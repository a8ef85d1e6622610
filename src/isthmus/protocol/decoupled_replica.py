"""A replica that never waits: it makes its own steps, and looks at what came in between two of them.

    joining ──every fragment is here──► training ──asked for the last time──► ending ──► over
                                          └────the host makes no more──► waiting ───┘

It goes on training while the merger cannot be reached. Its host hands on what came during a step when the step is done,
before `StepEnded`: nothing interrupts a step.
"""

from __future__ import annotations

from typing import Protocol

from isthmus.errors import PeerError
from isthmus.protocol.decoupled_events import CollectChanges, FragmentSent, LastStepMade, ReplicaOrder, StepsMade
from isthmus.protocol.run_messages import Halt
from isthmus.session.program import OVER, Policy

RETURN_S = 30.0  # after so long a pipeline begins anew that has lost its state, or the process of a lost device


class SamplesKnown:
    """Samples of all replicas so far, as one of them knows; the learning rate follows them. The versions that it takes
    name them, but late, and once in a merge. From one to the next it counts on by its own steps: if the learning rate
    stood still meanwhile, its warm-up would come too late, which short runs never make up for."""

    def __init__(self, per_step: int) -> None:
        """`per_step` of all replicas during a step of this one, until it knows better."""
        self._per_step = float(per_step)
        self._first = self._newest = (0, 0)
        """Samples and own steps. Versions come late: two of them, both late, say best how many samples a step is."""

    def heard(self, samples: int, steps: int) -> None:
        """Take the samples that a version names, received after so many own steps."""
        if samples <= self._newest[0]:
            return
        self._newest = samples, steps
        before, then = self._first
        if steps > then:
            self._per_step = (samples - before) / (steps - then)
        if not then:
            self._first = self._newest

    def after(self, steps: int) -> int:
        """Return when so many own steps were made."""
        samples, then = self._newest
        return samples + round((steps - then) * self._per_step)


class ReplicaPort(Protocol):
    """A replica asks this of its host."""

    def take(self, sent: FragmentSent) -> None:
        """Use the values that came with this order."""

    def train(self, samples: int) -> None:
        """Make the next step. `samples`: those of all replicas, as far as this one knows."""

    def contribute(self, collect: CollectChanges) -> None:
        """Give the merger the changes of these fragments."""

    def say(self, body: StepsMade | LastStepMade) -> None:
        """Tell the merger."""

    def stop(self) -> None:
        """Nothing follows."""


class DecoupledReplica(Policy[ReplicaPort]):
    """One replica's side. Its host sets `port`."""

    def __init__(self, fragments: int, per_step: int, steps: int = 0) -> None:
        """`per_step` is as of `SamplesKnown`; `steps` were made by an earlier process of this replica."""
        super().__init__("joining")
        self._fragments = fragments
        self._missing = set(range(fragments))  # fragments that it has no version of yet
        self.steps = steps
        self._known = SamplesKnown(per_step)
        self._asked: CollectChanges | None = None

    def check(self, order: CollectChanges | FragmentSent) -> None:
        """Say it before the order itself. PeerError for figures that no merger of these fragments says."""
        named = (order.fragment,) if isinstance(order, FragmentSent) else order.fragments
        if len(set(named)) < len(named) or any(fragment >= self._fragments for fragment in named):
            raise PeerError(f"named fragments {list(named)}, expected some of {self._fragments}")
        if isinstance(order, CollectChanges):
            return
        if not order.whole and order.fragment in self._missing:
            raise PeerError(f"sent a change of fragment {order.fragment}, of which nothing was sent before")
        if order.included > order.merge:
            raise PeerError(f"named contribution {order.included} in version {order.merge}, which is older")

    def ordered(self, order: ReplicaOrder | None) -> None:
        """Take an order of the merger. None: it cannot be reached; steps go on, and the host dials again."""
        match order:
            case _ if self.over:
                return
            case FragmentSent():
                self.port.take(order)
                self._taken(order)
            case CollectChanges():
                self._collect(order)
            case None:
                self._asked = None
                if self.phase == "ending":
                    self._end()
            case Halt():
                self._end()

    def _taken(self, sent: FragmentSent) -> None:
        ended = self.phase == "training"  # a step that is not counted yet: this came during it
        self._known.heard(sent.samples, self.steps + ended)
        if self.phase == "waiting" and sent.first:
            self.port.say(LastStepMade())  # the connection is another one: it may not have been received
        if self.phase != "joining":
            return
        self._missing.discard(sent.fragment)
        if not self._missing:
            self.phase = "training"
            self.port.train(self._known.after(self.steps))

    def _collect(self, collect: CollectChanges) -> None:
        if self.phase == "waiting":
            self.phase = "ending" if collect.last else "waiting"
            self.port.contribute(collect)
        else:
            self._asked = collect if self.phase == "training" else None

    def _end(self) -> None:
        self.phase = OVER
        self.port.stop()

    # What its host says

    def step_ended(self, samples: int, loss: float | None = None) -> None:
        self.steps += 1
        if self.over:  # the merger has ended the run during the step
            return
        self.port.say(StepsMade(steps=self.steps, samples=samples, loss=loss))
        asked, self._asked = self._asked, None
        if asked is not None:
            self.port.contribute(asked)
            if asked.last:
                self.phase = "ending"
                return
        self.port.train(self._known.after(self.steps))

    def last_step_made(self) -> None:
        """Its host makes no more."""
        self.phase = "waiting"
        self.port.say(LastStepMade())
