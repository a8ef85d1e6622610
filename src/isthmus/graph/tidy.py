"""Which operators of a converted graph stay, in which order, and what training changes."""

from __future__ import annotations

import msgspec

from isthmus.errors import UserError
from isthmus.graph.cuts import Flow
from isthmus.graph.opgraph import Op, OpGraph, Ref


def reachable(graph: OpGraph) -> OpGraph:
    """Only the ops that the loss, the count, the outputs or a written buffer need."""
    wanted = {r.op for r in (graph.loss, graph.count, *graph.outputs.values()) if r is not None}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.name in wanted or op.mutates:
            kept.append(op)
            wanted.update(ref.op for ref in op.refs())
    return msgspec.structs.replace(graph, ops=tuple(reversed(kept)))


def count_beside_loss(graph: OpGraph) -> OpGraph:
    """The operators that only the count needs go right before the loss: fewer values cross, and never a late count."""
    needed = {r.op for r in (graph.loss, *graph.outputs.values())}
    late = {graph.loss.op}
    for op in graph.ops:
        if late.intersection(r.op for r in op.refs()):
            late.add(op.name)
    for op in reversed(graph.ops):
        if op.name in needed or op.mutates:
            needed.update(ref.op for ref in op.refs())
            needed.add(op.name)
    moved = [op for op in graph.ops if op.kind == "operator" and op.name not in needed]
    if late.intersection(op.name for op in moved):
        raise UserError("model: the count is computed from the loss: expected it to be computed from the inputs")
    names = {op.name for op in moved}
    rest = [op for op in graph.ops if op.name not in names]
    at = next(i for i, op in enumerate(rest) if op.name == graph.loss.op)
    return msgspec.structs.replace(graph, ops=(*rest[:at], *moved, *rest[at:]))


def mark_training(train: OpGraph, evaluation: OpGraph) -> tuple[OpGraph, OpGraph]:
    """Both graphs, saying of each variable whether training changes it.

    A parameter that no gradient reaches (used under no_grad or detached only, or by eval alone) does not count as
    trainable: eager autograd gives it none either, and optimizers then pass it over.
    """
    due = Flow(train).differentiable
    trained = {op.target for op in train.ops if op.kind == "parameter" and Ref(op.name) in due}
    names = {name for op in train.ops for name in op.mutates}
    written = {op.target for op in train.ops if op.name in names}

    def marked(op: Op) -> Op:
        if op.kind == "parameter" and op.target not in trained:
            return msgspec.structs.replace(op, requires_grad=(False,))
        if op.kind == "buffer" and op.target in written:
            return msgspec.structs.replace(op, written=True)
        return op

    first, second = (
        msgspec.structs.replace(graph, ops=tuple(marked(op) for op in graph.ops)) for graph in (train, evaluation)
    )
    return first, second
