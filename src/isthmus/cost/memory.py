"""Bytes that a stage needs on its device, and by how much they exceed it."""

from __future__ import annotations

import math

from isthmus.cost.problem import Problem
from isthmus.graph import Op, StageGraph
from isthmus.plan import StageMemory


def trainable(op: Op) -> bool:
    return op.kind == "parameter" and any(op.requires_grad)


def elements(op: Op) -> int:
    """Elements of a variable; its shape does not depend on the batch."""
    return math.prod(op.outputs[0].shape_at(1))


def variable_bytes(problem: Problem, op: Op, *, borrowed: bool) -> StageMemory:
    """What one variable costs a stage. A borrowed parameter has no master copy and no optimizer state there."""
    weight = op.outputs[0].nbytes(1)
    if not trainable(op):
        return StageMemory(weights=weight, gradients=0, optimizer=0, activations=0)
    count, state = elements(op), problem.state
    return StageMemory(
        weights=weight if borrowed else weight + count * state.master_bytes,
        gradients=count * state.gradient_bytes,
        optimizer=0 if borrowed else count * state.optimizer_bytes,
        activations=0,
    )


def micro_batch_bytes(problem: Problem, stage: StageGraph) -> int:
    """Kept per micro-batch in flight: what autograd saves, and what was received forward."""
    saved = sum(problem.saved_bytes(op) for op in stage.ops)
    return saved + sum(c.spec.nbytes(problem.micro_batch_size) for c in stage.receives)


def stage_memory(problem: Problem, stage: StageGraph, in_flight: int) -> StageMemory:
    parts = [variable_bytes(problem, op, borrowed=op.name in stage.borrows) for op in stage.variables()]
    return StageMemory(
        weights=sum(p.weights for p in parts),
        gradients=sum(p.gradients for p in parts),
        optimizer=sum(p.optimizer for p in parts),
        activations=in_flight * micro_batch_bytes(problem, stage),
    )
