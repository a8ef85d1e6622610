"""The same stages with other messages: what a plan costs when its edges are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from isthmus.cost.build_plan import PlanLayout, build_replicas, built, copies_of, layouts_of, placed_as
from isthmus.cost.compression import as_requested
from isthmus.cost.compression.messages import StageMessage, packed_edges, sender_of, stage_messages_of
from isthmus.cost.placement import packed_as
from isthmus.cost.problem import Problem
from isthmus.cost.steptime import together
from isthmus.errors import FleetTooSmall, UserError
from isthmus.expected_loss import packed_note
from isthmus.plans import CompressionConfig, Edge, Packing, Plan, Prediction, Replica, Schedule, Stage, StageMemory
from isthmus.units import format_size


def plan_compression(name: str, problem: Problem, plan: Plan, ratio: float, *, feedback: bool = False) -> Plan:
    """The same stages, packed by another ratio planner than the problem's, with a new prediction.

    `ratio` is elements per element that is sent; what it bounds is the planner's. Raises UserError for an unknown
    planner, a ratio below 1 or a plan of another problem.
    """
    check_same_problem(problem, plan)
    Packing(codec="topk", ratio=ratio)  # refuses a bad one even where it does not matter
    asked = CompressionConfig(method=name, ratio=ratio, feedback=feedback)
    other = replace(problem, constraints=msgspec.structs.replace(problem.constraints, compression=asked))
    made = with_edges(other, plan, [as_requested(other, sender_of(other, replica)) for replica in plan.replicas])
    note = packed_note(asked, made.replicas)
    return msgspec.structs.replace(made, constraints=other.constraints, notes=(*made.notes, note))


def repeat_compression(problem: Problem, plan: Plan, document: Plan) -> Plan:
    """The plan, packed by the codecs that the document names for edges between the same stages; bytes are made anew.

    What the document does not pack travels as it is. Raises UserError for a plan of another problem.
    """
    named = {
        (number, edge.source, edge.target): (edge.forward_compression, edge.backward_compression)
        for number, replica in enumerate(document.replicas)
        for edge in replica.edges
    }
    edges: list[Sequence[Edge]] = []
    for number, replica in enumerate(plan.replicas):
        sender = sender_of(problem, replica)
        packings: dict[StageMessage, Packing | None] = {}
        for message in stage_messages_of(problem, sender):
            edge = replica.edges[message.edge]
            packed = named.get((number, edge.source, edge.target), (None, None))[message.backward]
            packings[message] = packed.packing if packed else None
        edges.append(packed_edges(sender, packings))
    return with_edges(problem, plan, edges)


def build_again(problem: Problem, layouts: Sequence[PlanLayout], document: Plan) -> Plan:
    """The plan of these layouts with the codecs that the document names, whatever the problem asks for: all figures
    are made anew, as `build_replicas` makes them, in the document's schedule."""
    problem = problem.under(document.replicas[0].schedule)
    dense = build_replicas(problem.uncompressed(), layouts, planner=document.planner)
    packed = repeat_compression(problem, dense, document)
    return msgspec.structs.replace(packed, constraints=problem.constraints)


def with_edges(problem: Problem, plan: Plan, edges: Sequence[Sequence[Edge]]) -> Plan:
    """The plan with these edges, one sequence per replica; limits in flight, memory and prediction are made anew.

    Shorter messages mean a shorter period, and then more micro-batches in flight hide the latency. Where an edge is
    another the certificate is dropped: it bounds plans that pack by the problem's method. Raises UserError for a plan
    of another problem.
    """
    check_same_problem(problem, plan)
    if all(tuple(e) == r.edges for r, e in zip(plan.replicas, edges, strict=True)):
        return plan
    replicas, predicted = _packed_as(problem, plan, edges)
    return msgspec.structs.replace(
        plan, replicas=replicas, certificate=None, predicted=together(predicted, plan.predicted.sync_s)
    )


def replica_predictions(problem: Problem, plan: Plan) -> list[Prediction]:
    """Predict each replica for itself, without averaging."""
    return _packed_as(problem, plan, [replica.edges for replica in plan.replicas])[1]


def _packed_as(
    problem: Problem, plan: Plan, edges: Sequence[Sequence[Edge]]
) -> tuple[tuple[Replica, ...], list[Prediction]]:
    placed = [placed_as(problem.uncompressed(), layout) for layout in layouts_of(plan)]
    return built([packed_as(p, tuple(e)) for p, e in zip(placed, edges, strict=True)])


def limited_as(problem: Problem, plan: Plan, schedules: Sequence[Schedule]) -> Plan:
    """The plan with other limits in flight, one schedule per replica, and the memory that they take; its prediction
    stays. UserError for another number of limits, FleetTooSmall where a device does not offer what they need."""
    found: list[Replica] = []
    for replica, schedule in zip(plan.replicas, schedules, strict=True):
        was, now = replica.schedule.in_flight, schedule.in_flight
        if len(was) != len(now):
            raise UserError(f"schedule.in_flight: got {len(now)} entries, expected {len(was)}, one per stage")
        stages = tuple(
            msgspec.structs.replace(stage, memory=_memory(stage, a, b))
            for stage, a, b in zip(replica.stages, was, now, strict=True)
        )
        workers = (*stages, *copies_of(problem.constraints, stages))
        for device in {stage.device for stage in workers}:
            need = sum(stage.memory.total for stage in workers if stage.device == device)
            offered = problem.offered_bytes(device)
            if need > offered:
                raise FleetTooSmall(
                    f"device {device} needs {format_size(need)} with {list(now)} micro-batches in flight, offers "
                    f"{format_size(offered)}{problem.constraints.after_headroom}: {format_size(need - offered)} short"
                )
        copies = workers[len(stages) :]
        limited = msgspec.structs.replace(replica.schedule, in_flight=now)
        found.append(msgspec.structs.replace(replica, stages=stages, copies=copies, schedule=limited))
    return msgspec.structs.replace(plan, replicas=tuple(found))


def check_same_problem(problem: Problem, plan: Plan) -> None:
    for field, got, expected in (
        ("model", plan.model, problem.flow.graph.name),
        ("fleet", plan.fleet, problem.fleet.name),
        ("micro_batch_size", plan.micro_batch_size, problem.micro_batch_size),
        ("micro_batches", plan.micro_batches, problem.micro_batches),
    ):
        if got != expected:
            raise UserError(f"plan: {field}: got {got!r}, the problem has {expected!r}")


def _memory(stage: Stage, in_flight: int, now: int) -> StageMemory:
    return msgspec.structs.replace(stage.memory, activations=stage.memory.activations // in_flight * now)
