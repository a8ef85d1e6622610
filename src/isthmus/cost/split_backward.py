"""Backwards in two parts: what of a stage's backward waits until its gradients have been sent, and what it keeps.

A stage that returns gradients computes those of its weights apart (`zero-bubble`, see `plans.schedule`). Within the
stage, a value is *received* if it depends on a received value with a gradient, else *of weights* if it depends on a
trained parameter. An operator's backward is apart

    wholly   where its output is of weights: no gradient that it gives is sent on
    half     where it takes both, as a layer does: one product for its input, one for its weight

Between B and W such a stage keeps what these operators took, and the gradients of what the latter gave.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.cost.problem import Problem
from isthmus.graph import Op, Ref, StageGraph


def weight_flops(problem: Problem, stage: StageGraph) -> int:
    """FLOPs of a stage's weight gradients that are computed apart, for one micro-batch."""
    return sum(problem.flops(op)[1] // (2 if both else 1) for op, both in _apart(stage))


def deferred_bytes(problem: Problem, stage: StageGraph) -> int:
    """Bytes that wait for the weight gradients of one micro-batch, between its B and its W."""
    size, by_name = problem.micro_batch_size, problem.flow.by_name
    taken: set[Ref] = set()
    gradients = 0
    for op, both in _apart(stage):
        taken.update(op.refs())
        gradients += sum(spec.nbytes(size) for spec in op.outputs) if both else 0
    kept = (ref for ref in taken if by_name[ref.op].kind != "parameter")
    return gradients + sum(by_name[ref.op].outputs[ref.index].nbytes(size) for ref in kept)


def _apart(stage: StageGraph) -> Iterator[tuple[Op, bool]]:
    """The operators with weight gradients, and whether what they take from other stages has a gradient too."""
    received = {c.value for c in stage.receives if c.gradient}
    if not received:
        return
    weights = {Ref(op.name) for op in stage.ops if op.kind == "parameter" and any(op.requires_grad)}
    for op in stage.ops:
        if op.kind != "operator" or not any(op.requires_grad):
            continue
        refs, outputs = set(op.refs()), {Ref(op.name, n) for n, learns in enumerate(op.requires_grad) if learns}
        both, takes_weights = not refs.isdisjoint(received), not refs.isdisjoint(weights)
        if both:
            received |= outputs
        elif takes_weights:
            weights |= outputs
        if takes_weights:
            yield op, both
