"""What a cut sends: the edges between stages, the shared parameters, and how long each takes (alpha + M / beta)."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cost.problem import Problem
from isthmus.errors import UserError
from isthmus.graph import Flow, Ref, StageGraph, TensorSpec
from isthmus.plans import Edge, SharedParameter


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


def shared_parameters(flow: Flow, stages: Sequence[StageGraph]) -> tuple[SharedParameter, ...]:
    return tuple(
        SharedParameter(
            name=flow.by_name[name].target,
            owner=stage.index,
            users=users,
            size_bytes=flow.by_name[name].outputs[0].nbytes(1),
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
