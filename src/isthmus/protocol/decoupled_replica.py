"""A replica that never waits: it makes its own steps, and looks at what came in between two of them.

    joining ──every fragment is here──► training ──asked for the last time──► ending ──► over
                                          └────the host makes no more──► waiting ───┘

It goes on training while the merger cannot be reached. Its host hands on what came during a step when the step is done,
before `StepEnded`: nothing interrupts a step.
"""

from __future__ import annotations

from typing import Literal

from isthmus.errors import PeerError
from isthmus.protocol.decoupled_events import (
    CollectChanges,
    Contribute,
    FragmentSent,
    LastStepMade,
    LinkLost,
    ReplicaEvent,
    ReplicaInstruction,
    StepEnded,
    StepsMade,
    StopReplica,
    Train,
)
from isthmus.protocol.machine import Machine, Transitions
from isthmus.protocol.run_messages import Halt

Phase = Literal["joining", "training", "waiting", "ending", "over"]

REPLICA = Transitions(
    "joining",
    "over",
    {
        "joining": {
            FragmentSent: "joining training",
            CollectChanges: "joining",
            LinkLost: "joining",
            Halt: "over",
        },
        "training": {
            StepEnded: "training ending",
            LastStepMade: "waiting",
            FragmentSent: "training",
            CollectChanges: "training",
            LinkLost: "training",
            Halt: "over",
        },
        "waiting": {
            FragmentSent: "waiting",
            CollectChanges: "waiting ending",
            LinkLost: "waiting",
            Halt: "over",
        },
        "ending": {
            FragmentSent: "ending",
            CollectChanges: "ending",
            LinkLost: "over",
            Halt: "over",
        },
    },
)


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
        """Of a version, taken after so many own steps."""
        if samples <= self._newest[0]:
            return
        self._newest = samples, steps
        before, then = self._first
        if steps > then:
            self._per_step = (samples - before) / (steps - then)
        if not then:
            self._first = self._newest

    def after(self, steps: int) -> int:
        """When so many own steps were made."""
        samples, then = self._newest
        return samples + round((steps - then) * self._per_step)


class DecoupledReplica(Machine[Phase, ReplicaEvent, ReplicaInstruction]):
    """One replica's side."""

    transitions = REPLICA

    def __init__(self, fragments: int, per_step: int, steps: int = 0) -> None:
        """`per_step` is as of `SamplesKnown`; `steps` were made by an earlier process of this replica."""
        super().__init__()
        self._fragments = fragments
        self._missing = set(range(fragments))
        """Fragments that it has no version of yet."""
        self.steps = steps
        self._known = SamplesKnown(per_step)
        self._asked: CollectChanges | None = None

    def check(self, order: CollectChanges | FragmentSent) -> None:
        """Before the machine takes it. PeerError for figures that no merger of these fragments says."""
        named = (order.fragment,) if isinstance(order, FragmentSent) else order.fragments
        if len(set(named)) < len(named) or any(fragment >= self._fragments for fragment in named):
            raise PeerError(f"named fragments {list(named)}, expected some of {self._fragments}")
        if isinstance(order, CollectChanges):
            return
        if not order.whole and order.fragment in self._missing:
            raise PeerError(f"sent a change of fragment {order.fragment}, of which nothing was sent before")
        if order.included > order.merge:
            raise PeerError(f"named contribution {order.included} in version {order.merge}, which is older")

    def _is_stale(self, event: ReplicaEvent) -> bool:
        return False

    def _take(self, event: ReplicaEvent) -> list[ReplicaInstruction]:
        match event:
            case FragmentSent():
                return self._fragment(event)
            case StepEnded():
                return self._stepped(event)
            case LastStepMade():
                self._phase = "waiting"
                return [event]
            case CollectChanges():
                return self._collect(event)
            case LinkLost():
                self._asked = None
                return self._over() if self._phase == "ending" else []
            case Halt():
                return self._over()
        return []

    def _fragment(self, sent: FragmentSent) -> list[ReplicaInstruction]:
        ended = self._phase == "training"  # a step that is not counted yet: this came during it
        self._known.heard(sent.samples, self.steps + ended)
        if self._phase == "waiting" and sent.first:
            return [sent, LastStepMade()]  # the connection is another one: it may not have been received
        if self._phase != "joining":
            return [sent]
        self._missing.discard(sent.fragment)
        if self._missing:
            return [sent]
        self._phase = "training"
        return [sent, Train(self._known.after(self.steps))]

    def _collect(self, collect: CollectChanges) -> list[ReplicaInstruction]:
        if self._phase == "waiting":
            self._phase = "ending" if collect.last else "waiting"
            return [Contribute(collect)]
        self._asked = collect if self._phase == "training" else None
        return []

    def _stepped(self, ended: StepEnded) -> list[ReplicaInstruction]:
        self.steps += 1
        out: list[ReplicaInstruction] = [StepsMade(steps=self.steps, samples=ended.samples, loss=ended.loss)]
        asked, self._asked = self._asked, None
        if asked is not None:
            out.append(Contribute(asked))
            if asked.last:
                self._phase = "ending"
                return out
        return [*out, Train(self._known.after(self.steps))]

    def _over(self) -> list[ReplicaInstruction]:
        self._phase = "over"
        return [StopReplica()]
