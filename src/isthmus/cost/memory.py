"""Bytes that a stage needs on its device, and by how much they exceed it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.cost.problem import Problem
from isthmus.graph import Op, StageGraph
from isthmus.plans import StageMemory


def trainable(op: Op) -> bool:
    return op.kind == "parameter" and any(op.requires_grad)


def elements(op: Op) -> int:
    """Elements of a variable; its shape does not depend on the batch."""
    return math.prod(op.outputs[0].shape_at(1))


def variable_bytes(problem: Problem, op: Op, *, shared_copy: bool) -> StageMemory:
    """What one variable costs a stage. A parameter that another stage owns has no master copy and no optimizer state
    there."""
    weight = op.outputs[0].nbytes(1)
    if not trainable(op):
        return StageMemory(weights=weight, gradients=0, optimizer=0, activations=0)
    count, state = elements(op), problem.state
    return StageMemory(
        weights=weight if shared_copy else weight + count * state.master_bytes,
        gradients=count * state.gradient_bytes,
        optimizer=0 if shared_copy else count * state.optimizer_bytes,
        activations=0,
    )


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """What a stage's memory is made of, whatever it holds in flight. The last three are per micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    """By autograd, for backward."""
    received: int
    columns: int
    """Of the batch, which the stage reads from its own data. Where autograd needs them they are in `saved`."""

    def kept(self, recompute: bool) -> int:
        """Per micro-batch in flight: what was received, and what is saved or, to run the forward again, read."""
        return self.received + (self.columns if recompute else self.saved)

    def memory(self, in_flight: int, recompute: bool = False) -> StageMemory:
        return StageMemory(
            weights=self.weights,
            gradients=self.gradients,
            optimizer=self.optimizer,
            activations=in_flight * self.kept(recompute),
            recomputed=self.saved if recompute else 0,
        )

    def most_in_flight(self, capacity_bytes: int, wanted: int, recompute: bool = False) -> int:
        """How many micro-batches fit, `wanted` at most; below 1 where not even one does."""
        free, each = capacity_bytes - self.memory(0, recompute).total, self.kept(recompute)
        if not each:
            return wanted if free >= 0 else 0
        return min(wanted, free // each)


def bytes_of(problem: Problem, stage: StageGraph) -> StageBytes:
    parts = [variable_bytes(problem, op, shared_copy=op.name in stage.shared_from) for op in stage.variables()]
    return StageBytes(
        weights=sum(p.weights for p in parts),
        gradients=sum(p.gradients for p in parts),
        optimizer=sum(p.optimizer for p in parts),
        saved=sum(problem.saved_bytes(op) for op in stage.ops),
        received=sum(c.spec.nbytes(problem.micro_batch_size) for c in stage.receives),
        columns=sum(problem.column_bytes[name] for name in stage.columns),
    )
