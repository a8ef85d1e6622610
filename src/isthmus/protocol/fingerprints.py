"""Devices report fingerprints of a step; a later comparison names the device that computed wrong.

A worker's fingerprint of a step has one digest per node: `sent KIND STAGE` and `received KIND STAGE` for the messages
of one kind to and from another stage; `summands` for what it adds to sums with other replicas; `gradients` for what its
optimizers take; `state` at a checkpoint. A node's digest is over its leaves, one per tensor.

The step is computed again. A node that differs is the worker's own fault if nothing that it is computed from differs:

    shared -> forward -> backward, shared_gradient, count -> summands -> gradients, norms -> state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from isthmus.wire_types import Count, Name, Table

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
SUMMANDS, GRADIENTS, STATE = "summands", "gradients", "state"
OWN = (SUMMANDS, GRADIENTS, STATE)  # nodes that are no messages
_STEP = frozenset({"shared", "forward", "backward"})
_UPDATE = _STEP | {"shared_gradient", "count"}
INPUTS: Mapping[str, frozenset[str]] = {
    "shared": frozenset(),
    "forward": frozenset({"shared", "forward"}),
    "count": frozenset({"shared", "forward"}),
    "backward": _STEP,
    "shared_gradient": _STEP,
    SUMMANDS: _UPDATE,
    GRADIENTS: _UPDATE,
    "norms": _UPDATE,
    STATE: _UPDATE | {"norms"},
}
"""Kinds of received messages that each kind of node is computed from, besides the state before the step."""


class StepFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values that a worker sent, received and computed in a step, as digests."""

    step: Count  # steps that are done with it
    digests: Table[Name, Digest]  # the digest of each node; in an audit of each `NODE/LEAF`


class StepFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a step that is not as it should be."""

    workers: tuple[str, ...]  # who computed wrong; several where the reports do not tell which of them
    nodes: tuple[str, ...]  # names of the nodes that differ


class Node(NamedTuple):
    direction: str  # `sent`, `received`, or empty for what is no message
    kind: str
    other: int = -1  # the stage at the other end

    @classmethod
    def parse(cls, name: str) -> Node | None:
        """None for a name that no honest device reports."""
        if name in OWN:
            return cls("", name)
        direction, _, rest = name.partition(" ")
        kind, _, other = rest.partition(" ")
        known = direction in ("sent", "received") and kind in INPUTS and kind not in OWN and other.isdecimal()
        return cls(direction, kind, int(other)) if known else None

    @property
    def name(self) -> str:
        return f"{self.direction} {self.kind} {self.other}" if self.direction else self.kind


Reports = Mapping[int, Mapping[str, str]]  # digests of the nodes of each stage


def judge(workers: Sequence[str], reported: Reports, expected: Reports) -> tuple[StepFinding, ...]:
    """Return who computed wrong in a step; the state before it is as it should be. Nothing where all that can be
    compared is equal.

    `reported` lacks workers that reported nothing. `expected` may lack nodes. Who sent what was received and cannot be
    compared is a suspect too. Who leaves out its gradients is named, and where nobody else is, who does not say what it
    sent, if that was received as something else.
    """
    compared = [_Compared(workers, stage, reported, expected) for stage in range(len(workers))]
    found: list[StepFinding] = []
    summed = any(SUMMANDS in nodes for nodes in reported.values())
    summands_differ = any(n.kind == SUMMANDS for c in compared for n in c.own)
    after_sum: dict[str, str] = {}
    for c in compared:
        own = [n for n in c.own if not (summed and n.kind in (GRADIENTS, "norms", STATE))]
        if len(own) < len(c.own) and not summands_differ:
            after_sum |= {c.worker: GRADIENTS}
        if own:
            found.append(StepFinding(workers=(c.worker, *c.senders_of(own)), nodes=tuple(sorted(n.name for n in own))))
        if c.hides_gradients:
            found.append(StepFinding(workers=(c.worker,), nodes=(GRADIENTS,)))
        found += c.disputes()
    if after_sum and not found:
        found.append(StepFinding(workers=tuple(after_sum), nodes=(GRADIENTS,)))
    return tuple(found or [one for c in compared for one in c.unsaid()])


class _Compared:
    def __init__(self, workers: Sequence[str], stage: int, reported: Reports, expected: Reports) -> None:
        self.worker = workers[stage]
        self._workers, self._stage, self._reported, self._expected = workers, stage, reported, expected
        self._nodes = sorted(n for n in map(Node.parse, reported.get(stage, {})) if n is not None)
        self._differing = [n for n in self._nodes if self._differs(stage, n.name)]
        wrong = {n.kind for n in self._differing if n.direction == "received"}
        self.own = [n for n in self._differing if n.direction != "received" and not INPUTS[n.kind] & wrong]
        """Nodes that differ although nothing differs that they are computed from."""

    def senders_of(self, nodes: Sequence[Node]) -> list[str]:
        """Return the senders of the messages that these nodes are computed from and that cannot be compared."""
        taken = frozenset[str]().union(*(INPUTS[n.kind] for n in nodes))
        unseen = {
            n.other
            for n in self._nodes
            if n.direction == "received" and n.kind in taken and n.name not in self._expected.get(self._stage, {})
        }
        return [self._workers[s] for s in sorted(unseen) if s < len(self._workers)]

    def disputes(self) -> list[StepFinding]:
        """Return the messages that are right as the sender reports them and wrong as this worker reports them."""
        found: list[StepFinding] = []
        for n in self._differing:
            sent = Node("sent", n.kind, self._stage).name
            says = n.direction == "received" and sent in self._reported.get(n.other, {})
            if says and n.other < len(self._workers) and not self._differs(n.other, sent):
                found.append(StepFinding(workers=(self._workers[n.other], self.worker), nodes=(sent, n.name)))
        return found

    @property
    def hides_gradients(self) -> bool:
        """It reported the step without them."""
        reported = self._reported.get(self._stage)
        return reported is not None and GRADIENTS in self._expected.get(self._stage, {}) and GRADIENTS not in reported

    def unsaid(self) -> list[StepFinding]:
        """Return the messages that this worker received wrong and whose sender does not report them."""
        return [
            StepFinding(workers=(self._workers[n.other], self.worker), nodes=(n.name,))
            for n in self._differing
            if n.direction == "received"
            and n.other < len(self._workers)
            and Node("sent", n.kind, self._stage).name not in self._reported.get(n.other, {})
        ]

    def _differs(self, stage: int, name: str) -> bool:
        expected = self._expected.get(stage, {})
        return name in expected and self._reported[stage][name] != expected[name]
