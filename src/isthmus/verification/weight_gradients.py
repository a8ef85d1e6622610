"""The part of a stage's backward that may wait under `zero-bubble`: weight gradients where it returns others."""

from __future__ import annotations

import math

from isthmus.graph.opgraph import DTYPE_BYTES, Op, Ref
from isthmus.verification.reading import GraphReading


def weight_gradients(reading: GraphReading, start: int, end: int) -> dict[str, int]:
    """`apart_flops` and `waiting_bytes` of the stage that runs positions `start .. end - 1`, for one micro-batch.

    All of an operator's backward waits where it leads to weights alone, half of it where it leads to both, and nothing
    where these weights are vectors; what such operators took is kept, and of halves the gradients of what they gave.
    """
    returned = {
        Ref(*_split(value.name))
        for value in reading.values
        if value.made < start and any(start <= use < end for use in value.returns)
    }
    if not returned:
        return {}
    size = reading.question.micro_batch_size
    inside = [op for op in reading.question.graph.ops if _runs(reading, op, start, end)]
    onward, weights = set(returned), set[Ref]()
    flops, taken, given = 0, set[Ref](), 0
    for op in inside:
        if not any(op.requires_grad):
            continue
        outputs = {Ref(op.name, number) for number, learns in enumerate(op.requires_grad) if learns}
        if op.kind == "parameter":
            weights |= outputs
        if op.kind != "operator":
            continue
        refs = set(op.refs())
        through = bool(refs & onward)
        matrices = any(len(reading.by_name[r.op].outputs[r.index].shape) > 1 for r in refs & weights)
        if refs & weights and (matrices or not through):
            backward = op.flops_backward.at(size) if op.name in reading.position else 0
            flops += backward // 2 if through else backward
            taken |= refs
            given += sum(_bytes(reading, Ref(op.name, n)) for n in range(len(op.outputs))) if through else 0
        if through:
            onward |= outputs
        elif refs & weights:
            weights |= outputs
    kept = (ref for ref in taken if reading.by_name[ref.op].kind != "parameter")
    return {"apart_flops": flops, "waiting_bytes": given + sum(_bytes(reading, ref) for ref in kept)}


def _runs(reading: GraphReading, op: Op, start: int, end: int) -> bool:
    """Return whether the stage runs `op`. An operator without a position runs wherever it is needed."""
    return op.name not in reading.position or start <= reading.position[op.name] < end


def _split(name: str) -> tuple[str, int]:
    op, _, index = name.partition(":")
    return op, int(index or 0)


def _bytes(reading: GraphReading, ref: Ref) -> int:
    spec = reading.by_name[ref.op].outputs[ref.index]
    return math.prod(spec.shape_at(reading.question.micro_batch_size)) * DTYPE_BYTES[spec.dtype]
