"""A pipeline's messages, one per edge and direction, and its edges when they are packed with given codecs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from isthmus.cost.problem import Problem
from isthmus.cost.stage_costs import compute_s, transfer_s, value_spec, wire_s
from isthmus.graph import TensorSpec
from isthmus.plans import Compression, Edge, Packing, Replica


class Sender(NamedTuple):
    """One pipeline: a device per stage, its edges, and how long its slowest device computes per micro-batch."""

    devices: tuple[str, ...]
    edges: tuple[Edge, ...]
    slowest_s: float


class StageMessage(NamedTuple):
    """A message of one stage to another for each micro-batch."""

    edge: int  # its number among the pipeline's edges
    backward: bool
    source: str
    target: str
    size_bytes: int
    tensors: tuple[tuple[int, str], ...]
    """Elements and dtype of each tensor that carries a gradient, or is one: these a codec may pack. The others travel
    as they are: ids, positions, and masks, which are others without their zeros."""

    def packed(self, packing: Packing) -> Compression | None:
        """None where packing would not make the message shorter: then it travels as it is."""
        saved_bytes = sum(packing.saves(*tensor) for tensor in self.tensors)
        if not saved_bytes:
            return None
        return Compression(
            codec=packing.codec,
            ratio=packing.ratio,
            feedback=packing.feedback,
            wire_bytes=self.size_bytes - saved_bytes,
        )

    def wire_bytes(self, packing: Packing | None) -> int:
        packed = self.packed(packing) if packing else None
        return packed.wire_bytes if packed else self.size_bytes

    def transfer_s(self, problem: Problem) -> float:
        """R of FusionLLM (section 3.5): alpha + beta M, uncompressed."""
        return transfer_s(problem, self.source, self.target, self.size_bytes)

    def wire_s(self, problem: Problem, packing: Packing | None) -> float:
        """Return how long it occupies its link."""
        return wire_s(problem, self.source, self.target, self.wire_bytes(packing))


Packings = Mapping[StageMessage, Packing | None]


def sender_of(problem: Problem, replica: Replica) -> Sender:
    busy: dict[str, float] = {}
    for s in replica.stages:
        busy[s.device] = busy.get(s.device, 0.0) + compute_s(problem, s.device, s.flops_forward + s.flops_backward)
    return Sender(tuple(s.device for s in replica.stages), replica.edges, max(busy.values()))


def stage_messages_of(problem: Problem, sender: Sender) -> tuple[StageMessage, ...]:
    """All messages of some bytes that cross a link; whatever compression the edges have is left out of account.

    Raises UserError where an edge names a value that the problem's graph does not have.
    """
    return tuple(_messages(problem, sender))


def _messages(problem: Problem, sender: Sender) -> Iterator[StageMessage]:
    for index, edge in enumerate(sender.edges):
        source, target = sender.devices[edge.source], sender.devices[edge.target]
        if source == target:
            continue
        specs = [value_spec(problem.flow, name) for name in edge.gradients]
        tensors = tuple(tensor_of(spec, problem.micro_batch_size) for spec in specs)
        # A gradient has its value's type and shape, so what goes back is what may be packed on the way there.
        if edge.forward_bytes:
            yield StageMessage(index, False, source, target, edge.forward_bytes, tensors)
        if edge.backward_bytes:
            yield StageMessage(index, True, target, source, edge.backward_bytes, tensors)


def tensor_of(spec: TensorSpec, batch: int) -> tuple[int, str]:
    """(elements, dtype)."""
    return math.prod(spec.shape_at(batch)), spec.dtype


def packed_edges(sender: Sender, packings: Packings) -> tuple[Edge, ...]:
    """The pipeline's edges, packed so; what `packings` does not name travels as it is."""
    packed: dict[tuple[int, bool], Compression | None] = {
        (message.edge, message.backward): message.packed(packing) if packing else None
        for message, packing in packings.items()
    }
    return tuple(
        msgspec.structs.replace(
            edge, forward_compression=packed.get((k, False)), backward_compression=packed.get((k, True))
        )
        for k, edge in enumerate(sender.edges)
    )


def with_feedback(edge: Edge) -> Edge:
    """The edge whose packed gradients remember, sample by sample, what was left out. It costs no byte on the wire."""
    packed = edge.backward_compression
    if packed is None:
        return edge
    return msgspec.structs.replace(edge, backward_compression=msgspec.structs.replace(packed, feedback=True))
