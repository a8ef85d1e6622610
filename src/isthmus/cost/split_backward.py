"""Backwards in two parts: what of a stage's backward waits until its gradients have been sent, and what it keeps.

A stage that returns gradients computes those of its weights apart (`zero-bubble`, see `plans.schedule`). Within the
stage, a value is *received* if it depends on a received value with a gradient, else *of weights* if it depends on a
trained parameter. An operator's backward is apart

    wholly   where its output is of weights: no gradient that it gives is sent on
    half     where it takes both and some weights are no vectors, as in a layer: one product for its input, one for its
             weight
    not      where it takes both and all weights are vectors, as in a norm: their gradients come with its input's

Between B and W such a stage keeps what these operators took, and the gradients of what the latter gave.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.cost.problem import Problem
from isthmus.graph import Op, Ref, StageGraph


def weight_flops(problem: Problem, stage: StageGraph) -> int:
    """FLOPs of a stage's weight gradients that are computed apart, for one micro-batch."""
    return sum(problem.flops(op)[1] // (2 if both else 1) for op, both in _apart(problem, stage))


def deferred_bytes(problem: Problem, stage: StageGraph) -> int:
    """Bytes that wait for the weight gradients of one micro-batch, between its B and its W."""
    size = problem.micro_batch_size
    taken: set[Ref] = set()
    gradients = 0
    for op, both in _apart(problem, stage):
        taken.update(op.refs())
        gradients += sum(spec.nbytes(size) for spec in op.outputs) if both else 0
    by_name = problem.flow.by_name
    kept = (by_name[ref.op].outputs[ref.index] for ref in taken if by_name[ref.op].kind != "parameter")
    return gradients + sum(spec.nbytes(size) for spec in kept)


def _apart(problem: Problem, stage: StageGraph) -> Iterator[tuple[Op, bool]]:
    """The operators of whose backward a part is apart, and whether it is half of it."""
    received = {c.value for c in stage.receives if c.gradient}
    if not received:
        return
    weights = {Ref(op.name) for op in stage.ops if op.kind == "parameter" and any(op.requires_grad)}
    for op in stage.ops:
        if op.kind != "operator" or not any(op.requires_grad):
            continue
        refs, outputs = set(op.refs()), {Ref(op.name, n) for n, learns in enumerate(op.requires_grad) if learns}
        both, taken = not refs.isdisjoint(received), refs & weights
        if both:
            received |= outputs
        elif taken:
            weights |= outputs
        vectors = all(len(problem.flow.by_name[ref.op].outputs[ref.index].shape) <= 1 for ref in taken)
        if taken and not (both and vectors):
            yield op, both
