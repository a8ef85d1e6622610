"""A replica that never waits: it makes its own steps, and looks at what came in between two of them.

    joining ──every fragment is here──► training ──asked for the last time──► ending ──► over

It goes on training while the merger cannot be reached. Its host hands on what came during a step when the step is done,
before `StepEnded`: nothing interrupts a step.
"""

from __future__ import annotations

from typing import Literal

from isthmus.protocol.decoupled_events import (
    CollectChanges,
    Contribute,
    FragmentSent,
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

Phase = Literal["joining", "training", "ending", "over"]

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
            FragmentSent: "training",
            CollectChanges: "training",
            LinkLost: "training",
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


class DecoupledReplica(Machine[Phase, ReplicaEvent, ReplicaInstruction]):
    """One replica's side."""

    transitions = REPLICA

    def __init__(self, fragments: int) -> None:
        super().__init__()
        self._missing = set(range(fragments))
        """Fragments that it has no version of yet."""
        self.steps = 0
        self._samples = 0
        self._asked: CollectChanges | None = None

    def _is_stale(self, event: ReplicaEvent) -> bool:
        return False

    def _take(self, event: ReplicaEvent) -> list[ReplicaInstruction]:
        match event:
            case FragmentSent():
                return self._fragment(event)
            case StepEnded():
                return self._stepped(event)
            case CollectChanges():
                self._asked = event if self._phase == "training" else None
            case LinkLost():
                self._asked = None
                return self._over() if self._phase == "ending" else []
            case Halt():
                return self._over()
        return []

    def _fragment(self, sent: FragmentSent) -> list[ReplicaInstruction]:
        self._samples = max(self._samples, sent.samples)
        if self._phase != "joining":
            return [sent]
        self._missing.discard(sent.fragment)
        if self._missing:
            return [sent]
        self._phase = "training"
        return [sent, Train(self._samples)]

    def _stepped(self, ended: StepEnded) -> list[ReplicaInstruction]:
        self.steps += 1
        out: list[ReplicaInstruction] = [StepsMade(steps=self.steps, samples=ended.samples, loss=ended.loss)]
        asked, self._asked = self._asked, None
        if asked is not None:
            out.append(Contribute(asked))
            if asked.last:
                self._phase = "ending"
                return out
        return [*out, Train(self._samples)]

    def _over(self) -> list[ReplicaInstruction]:
        self._phase = "over"
        return [StopReplica()]
