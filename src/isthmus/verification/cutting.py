"""A graph cut into stages: what each computes, keeps, sends and shares. Bytes and FLOPs only, no device yet.

The part of a stage's backward that may wait under `zero-bubble`: weight gradients where it returns others.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from isthmus.errors import UserError
from isthmus.graph.opgraph import DTYPE_BYTES, Op, Ref
from isthmus.verification.reading import GraphReading, GraphValue


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


class Part(NamedTuple):
    """One stage. FLOPs and bytes kept are for one micro-batch."""

    forward_flops: int
    backward_flops: int
    parameter_bytes: int
    weights: int
    gradients: int
    optimizer: int
    saved_bytes: int  # bytes that operators save for the backward
    received_bytes: int
    column_bytes: int
    apart_flops: int = 0
    """Operations of weight gradients, among those of the backward, that wait until the other gradients are sent."""
    waiting_bytes: int = 0  # bytes that the operations of these weight gradients keep
    working_bytes: int = 0
    """The most that one operator takes while it runs, and gradients of own parameters from other stages."""

    def kept_bytes(self, recompute: bool) -> int:
        """From forward to backward: what was received, and what was saved or, to compute it again, read."""
        if recompute:
            return self.received_bytes + self.column_bytes
        return max(self.received_bytes + self.saved_bytes, self.waiting_bytes)

    def memory_bytes(self, in_flight: int, recompute: bool) -> int:
        again = self.working_bytes + (self.saved_bytes if recompute else 0)
        return self.weights + self.gradients + self.optimizer + again + in_flight * self.kept_bytes(recompute)

    def backward_work(self, recompute: bool) -> int:
        """FLOPs of the backward; those of a second forward come first."""
        return self.backward_flops + (self.forward_flops if recompute else 0)


class Flowing(NamedTuple):
    """Values that stage `source` sends stage `target`, and gradients that come back; names in the graph's order."""

    source: int
    target: int
    values: tuple[str, ...]
    gradients: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    packable: tuple[tuple[int, str], ...]
    """Elements and dtype of each tensor whose gradient comes back: a codec may pack these, and the gradients."""


class SharedVariable(NamedTuple):
    """A trained parameter that other stages use too."""

    name: str
    owner: int
    users: tuple[int, ...]
    size_bytes: int
    gradient_bytes: int  # float32 at least


class CutGraph(NamedTuple):
    parts: tuple[Part, ...]
    flowing: tuple[Flowing, ...]
    shared_uses: tuple[SharedVariable, ...]
    owners: dict[str, tuple[int, int]]  # (stage that updates it, elements) by the op of a trained parameter


def cut(reading: GraphReading, starts: Sequence[int]) -> CutGraph:
    """Stage k runs positions `starts[k] .. starts[k + 1] - 1`; `starts[0]` is 0.

    Raises UserError where a buffer that is written has users in two stages.
    """
    flowing = _flowing(reading, starts)
    received = [sum(f.forward_bytes for f in flowing if f.target == k) for k in range(len(starts))]
    columns = [0] * len(starts)
    for value in reading.values:
        columns[bisect.bisect_right(starts, value.made) - 1] += value.size_bytes if value.column else 0
    ends = [*starts[1:], len(reading.operators)]
    held, shared_uses, owners = _variables(reading, starts)
    parts = tuple(
        Part(
            reading.work[0][end] - reading.work[0][start],
            reading.work[1][end] - reading.work[1][start],
            *held[k],
            saved_bytes=reading.kept[end] - reading.kept[start],
            received_bytes=received[k],
            column_bytes=columns[k],
            working_bytes=max(reading.at_work[start:end], default=0)
            + sum(len(shared.users) * shared.gradient_bytes for shared in shared_uses if shared.owner == k),
            **(weight_gradients(reading, start, end) if reading.question.schedule == "zero-bubble" else {}),
        )
        for k, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
    return CutGraph(parts, flowing, shared_uses, owners)


def _stages(positions: Sequence[int], starts: Sequence[int]) -> list[int]:
    return sorted({bisect.bisect_right(starts, position) - 1 for position in positions})


def _flowing(reading: GraphReading, starts: Sequence[int]) -> tuple[Flowing, ...]:
    found: dict[tuple[int, int], list[tuple[GraphValue, bool]]] = {}
    for value in reading.values:
        end = value.uses[-1]
        source = bisect.bisect_right(starts, value.made) - 1
        if source + 1 == len(starts) or end < starts[source + 1]:
            continue  # all its users are at home
        back = _stages(value.returns, starts)
        for target in _stages(value.uses, starts):
            if target != source:
                found.setdefault((target, source), []).append((value, target in back))
    return tuple(
        Flowing(
            source=source,
            target=target,
            values=tuple(value.name for value, _ in sent),
            gradients=tuple(value.name for value, back in sent if back),
            forward_bytes=sum(value.size_bytes for value, _ in sent),
            backward_bytes=sum(value.size_bytes for value, back in sent if back),
            packable=tuple((value.elements, value.dtype) for value, back in sent if back),
        )
        for (target, source), sent in sorted(found.items())
    )


def _variables(
    reading: GraphReading, starts: Sequence[int]
) -> tuple[list[tuple[int, int, int, int]], tuple[SharedVariable, ...], dict[str, tuple[int, int]]]:
    """Per stage (parameter bytes, weights, gradients, optimizer); what is shared; who updates what."""
    held = [[0, 0, 0, 0] for _ in starts]
    state = reading.question.state
    shared_uses: list[SharedVariable] = []
    owners: dict[str, tuple[int, int]] = {}
    for v in reading.variables:
        # What nothing uses stays with the last stage.
        users = _stages(v.uses, starts) or [len(starts) - 1]
        if v.written and len(users) > 1:
            raise UserError(f"buffer {v.name!r}: got users in stages {users}, expected one stage: it is written there")
        for stage in users:
            row, owned = held[stage], stage == users[0]
            row[0] += v.size_bytes if v.parameter else 0
            row[1] += v.size_bytes + (v.elements * state.master if v.trained and owned else 0)
            row[2] += v.elements * state.gradient if v.trained else 0
            row[3] += v.elements * state.optimizer if v.trained and owned else 0
        if v.trained:
            owners[v.op] = (users[0], v.elements)
            if len(users) > 1:
                back_bytes = max(v.size_bytes, 4 * v.elements)
                shared_uses.append(SharedVariable(v.name, users[0], tuple(users[1:]), v.size_bytes, back_bytes))
    return [(a, b, c, d) for a, b, c, d in held], tuple(shared_uses), owners
