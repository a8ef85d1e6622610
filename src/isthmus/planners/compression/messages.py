"""A plan's messages, one per edge and direction, and the plan that packs them with given codecs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from isthmus.cost import Problem, with_edges
from isthmus.cost.transfer import transfer_s, value_spec, wire_s
from isthmus.plan import Compression, Edge, Packing, Plan, Replica


class Message(NamedTuple):
    """What one stage sends another for each micro-batch."""

    replica: int
    edge: int
    """Its number among the replica's edges."""
    backward: bool
    source: str
    """Device that sends."""
    target: str
    size_bytes: int
    elements: tuple[int, ...]
    """Of each tensor that carries a gradient: these a codec may pack."""
    exact_bytes: int
    """Of the others, which travel as they are: ids, positions, and masks, which are others without their zeros."""

    def packed(self, packing: Packing) -> Compression | None:
        """None where packing would not make the message shorter: then it travels as it is."""
        size_bytes = self.exact_bytes + sum(map(packing.wire_bytes, self.elements))
        if size_bytes >= self.size_bytes:
            return None
        return Compression(
            codec=packing.codec, ratio=packing.ratio, feedback=packing.feedback, wire_bytes=size_bytes
        )  # fmt: skip

    def wire_bytes(self, packing: Packing | None) -> int:
        packed = self.packed(packing) if packing else None
        return packed.wire_bytes if packed else self.size_bytes

    def transfer_s(self, problem: Problem) -> float:
        """R of FusionLLM (section 3.5): alpha + beta M, uncompressed."""
        return transfer_s(problem, self.source, self.target, self.size_bytes)

    def wire_s(self, problem: Problem, packing: Packing | None) -> float:
        """How long it occupies its link."""
        return wire_s(problem, self.source, self.target, self.wire_bytes(packing))


def messages_of(problem: Problem, plan: Plan) -> tuple[Message, ...]:
    """All messages of some bytes, replica after replica; whatever compression the plan has is left out of account.

    Raises UserError where an edge names a value that the problem's graph does not have.
    """
    return tuple(m for number, replica in enumerate(plan.replicas) for m in _of_replica(problem, number, replica))


def _of_replica(problem: Problem, number: int, replica: Replica) -> Iterator[Message]:
    devices = [stage.device for stage in replica.stages]
    for index, edge in enumerate(replica.edges):
        specs = [value_spec(problem.flow, name) for name in edge.gradients]
        elements = tuple(math.prod(spec.shape_at(problem.micro_batch_size)) for spec in specs)
        source, target = devices[edge.source], devices[edge.target]
        # A gradient has its value's type and shape, so what goes back is what may be packed on the way there.
        exact_bytes = edge.forward_bytes - edge.backward_bytes
        if edge.forward_bytes:
            yield Message(number, index, False, source, target, edge.forward_bytes, elements, exact_bytes)
        if edge.backward_bytes:
            yield Message(number, index, True, target, source, edge.backward_bytes, elements, 0)


def compressed(problem: Problem, plan: Plan, packings: Mapping[Message, Packing | None], *, planner: str) -> Plan:
    """The plan whose messages are packed so, those that `packings` does not name not at all; predicted anew.

    Raises UserError for a plan of another problem.
    """
    packed: dict[tuple[int, int, bool], Compression] = {}
    for message, packing in packings.items():
        compression = message.packed(packing) if packing else None
        if compression is not None:
            packed[message.replica, message.edge, message.backward] = compression
    edges = [
        [_edge(edge, packed.get((r, k, False)), packed.get((r, k, True))) for k, edge in enumerate(replica.edges)]
        for r, replica in enumerate(plan.replicas)
    ]
    made = with_edges(problem, plan, edges)
    note = f"compression {planner!r} packs {len(packed)} of {len(messages_of(problem, plan))} messages"
    return msgspec.structs.replace(made, notes=(*plan.notes, note))


def with_feedback(plan: Plan) -> Plan:
    """The plan whose packed gradients remember, sample by sample, what was left out. It costs no byte on the wire."""
    replicas = [msgspec.structs.replace(r, edges=tuple(_remembering(e) for e in r.edges)) for r in plan.replicas]
    return msgspec.structs.replace(plan, replicas=tuple(replicas))


def _remembering(edge: Edge) -> Edge:
    packed = edge.backward_compression
    if packed is None:
        return edge
    return msgspec.structs.replace(edge, backward_compression=msgspec.structs.replace(packed, feedback=True))


def repeat_compression(problem: Problem, plan: Plan, document: Plan) -> Plan:
    """The plan, packed by the codecs that the document names for edges between the same stages; bytes are made anew.

    A document without compression leaves the plan as it is. Raises UserError for a plan of another problem.
    """
    named: dict[tuple[int, int, int, bool], Packing] = {}
    for number, replica in enumerate(document.replicas):
        for edge in replica.edges:
            for backward, packed in ((False, edge.forward_compression), (True, edge.backward_compression)):
                if packed is not None:
                    named[number, edge.source, edge.target, backward] = packed.packing
    if not named:
        return plan
    edges = [replica.edges for replica in plan.replicas]
    packings: dict[Message, Packing | None] = {}
    for m in messages_of(problem, plan):
        edge = edges[m.replica][m.edge]
        packings[m] = named.get((m.replica, edge.source, edge.target, m.backward))
    return compressed(problem, plan, packings, planner="of the plan document")


def _edge(edge: Edge, forward: Compression | None, backward: Compression | None) -> Edge:
    return msgspec.structs.replace(edge, forward_compression=forward, backward_compression=backward)
