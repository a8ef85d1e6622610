"""The costs of a stage: seconds of compute (FLOPs / (lambda * S*)), bytes on its device, and the bytes and times (alpha
+ M / beta) of its messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.cost.problem import FLOAT32_BYTES, Problem
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import Flow, Op, Ref, StageGraph, TensorSpec
from isthmus.plans import Edge, SharedParameter, StageMemory


class StageFlops(NamedTuple):
    """FLOPs of one micro-batch."""

    forward: int
    backward: int  # with the second forward, where the stage recomputes
    apart: int = 0  # FLOPs, among those of the backward, of weight gradients that are computed apart


def stage_flops(problem: Problem, stage: StageGraph, *, recompute: bool = False) -> StageFlops:
    """Return the FLOPs of one micro-batch. A stage that recomputes has nothing apart."""
    pairs = [problem.flops(op) for op in stage.ops]
    forward, backward = sum(f for f, _ in pairs), sum(b for _, b in pairs)
    if recompute:
        return StageFlops(forward, backward + forward)
    return StageFlops(forward, backward, weight_flops(problem, stage) if problem.splits else 0)


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
    """The operators of whose backward a part is apart, and whether it is half of it.

    A stage that returns gradients computes those of its weights apart (`zero-bubble`, see `plans.schedule`). Within the
    stage, a value is *received* if it depends on a received value with a gradient, else *of weights* if it depends on a
    trained parameter. An operator's backward is apart

        wholly   where its output is of weights: no gradient that it gives is sent on
        half     where it takes both and some weights are no vectors, as in a layer: one product for its input, one for
                 its weight
        not      where it takes both and all weights are vectors, as in a norm: their gradients come with its input's

    Between B and W such a stage keeps what these operators took, and the gradients of what the latter gave.
    """
    received = {c.value for c in stage.receives if c.gradient}
    if not received:
        return
    weights = {Ref(op.name) for op in stage.ops if trainable(op)}
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


def compute_s(problem: Problem, device: str, flops: float) -> float:
    return flops / problem.fleet.device(device).sustained_flops_per_s


def trainable(op: Op) -> bool:
    return op.kind == "parameter" and any(op.requires_grad)


def elements(op: Op) -> int:
    """Elements of a variable; its shape does not depend on the batch."""
    return math.prod(op.outputs[0].shape_at(1))


def variable_bytes(problem: Problem, op: Op, *, shared_copy: bool) -> StageMemory:
    """Return the memory of one variable on a stage. A parameter that another stage owns has no master copy and no
    optimizer state there."""
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
    """The parts of a stage's memory, whatever it holds in flight."""

    weights: int
    gradients: int
    optimizer: int
    saved: int  # per micro-batch: bytes that autograd saves for the backward
    received: int
    columns: int
    """Columns of the batch, which the stage reads from its own data. Where autograd needs them they are in `saved`."""
    deferred: int = 0  # between a backward and weight gradients that are computed apart
    working: int = 0
    """Not per micro-batch: of the operator that needs most while it runs, and gradients that users of this stage's
    parameters return."""

    def kept(self, recompute: bool) -> int:
        """Per micro-batch in flight: what was received, and what is saved or, to run the forward again, read."""
        return self.received + self.columns if recompute else max(self.received + self.saved, self.deferred)

    def memory(self, in_flight: int, recompute: bool = False) -> StageMemory:
        return StageMemory(
            weights=self.weights,
            gradients=self.gradients,
            optimizer=self.optimizer,
            activations=in_flight * self.kept(recompute),
            recomputed=self.saved if recompute else 0,
            working=self.working,
        )

    def most_in_flight(self, capacity_bytes: int, wanted: int) -> int:
        """Return how many micro-batches fit, `wanted` at most; below 1 where not even one does. Nothing is
        recomputed."""
        free, each = capacity_bytes - self.memory(0).total, self.kept(recompute=False)
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
        deferred=deferred_bytes(problem, stage) if problem.splits else 0,
        working=working_bytes(problem, stage),
    )


def working_bytes(problem: Problem, stage: StageGraph) -> int:
    """Bytes that the operator takes which needs most while it runs, and gradients that users of parameters return."""
    returned = (len(users) * gradient_bytes(problem.flow.by_name[name]) for name, users in stage.shared_with.items())
    return max((problem.working_bytes(op) for op in stage.ops), default=0) + sum(returned)


def value_name(flow: Flow, ref: Ref) -> str:
    """`op`, or `op:index` where the op has several outputs."""
    return ref.op if len(flow.by_name[ref.op].outputs) == 1 else f"{ref.op}:{ref.index}"


def value_spec(flow: Flow, name: str) -> TensorSpec:
    """The type and shape of a value that an edge names. Raises UserError where the graph has no such value."""
    op, _, index = name.partition(":")
    outputs = flow.by_name[op].outputs if op in flow.by_name else ()
    number = int(index) if index.isdecimal() else 0
    if number >= len(outputs):
        raise UserError(f"plan: edges: got value {name!r}, expected one of graph {flow.graph.name!r}")
    return outputs[number]


def edges_of(flow: Flow, stages: Sequence[StageGraph], batch: int) -> tuple[Edge, ...]:
    """One edge per pair of stages that exchange values, by (target, source). `batch` is the micro-batch size."""
    found: list[Edge] = []
    for stage in stages:
        for source in sorted({c.source for c in stage.receives}):
            crossings = [c for c in stage.receives if c.source == source]
            due = [c for c in crossings if c.gradient]
            found.append(
                Edge(
                    source=source,
                    target=stage.index,
                    values=tuple(value_name(flow, c.value) for c in crossings),
                    gradients=tuple(value_name(flow, c.value) for c in due),
                    forward_bytes=sum(c.spec.nbytes(batch) for c in crossings),
                    backward_bytes=sum(c.spec.nbytes(batch) for c in due),
                )
            )
    return tuple(found)


def gradient_bytes(op: Op) -> int:
    """Bytes of a parameter's gradient when it travels by itself: in float32 where the parameter is narrower."""
    return max(op.outputs[0].nbytes(1), FLOAT32_BYTES * elements(op))


def shared_parameters(flow: Flow, stages: Sequence[StageGraph]) -> tuple[SharedParameter, ...]:
    return tuple(
        SharedParameter(
            name=flow.by_name[name].target,
            owner=stage.index,
            users=users,
            size_bytes=flow.by_name[name].outputs[0].nbytes(1),
            gradient_bytes=gradient_bytes(flow.by_name[name]),
        )
        for stage in stages
        for name, users in stage.shared_with.items()
    )


def transfer_s(problem: Problem, source: str, target: str, size_bytes: int) -> float:
    """alpha + M / beta on the link between two devices; a message of no bytes is not sent, nor one to itself."""
    return problem.fleet.link(source, target).transfer_s(size_bytes) if size_bytes and source != target else 0.0


def wire_s(problem: Problem, source: str, target: str, size_bytes: int) -> float:
    """M / beta: how long the message occupies the link."""
    if not size_bytes or source == target:
        return 0.0
    return size_bytes / problem.fleet.link(source, target).bandwidth_bytes_per_s


def uplinks_s(fleet: Fleet, sent: Iterable[tuple[str, str, int]]) -> dict[str, float]:
    """Return how long messages, (source, target, bytes), occupy each shared uplink, by region."""
    found: dict[str, float] = {}
    for source, target, size_bytes in sent:
        site = fleet.uplink(source, target)
        if site is not None and site.uplink_bytes_per_s is not None:
            found[site.region] = found.get(site.region, 0.0) + size_bytes / site.uplink_bytes_per_s
    return found
