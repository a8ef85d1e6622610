"""The same stages with other messages: what a plan costs when its edges are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from isthmus.cost.in_flight import Room, in_flight_limits
from isthmus.cost.problem import Problem
from isthmus.cost.steptime import pipeline, prediction, together
from isthmus.errors import UserError
from isthmus.plan import Edge, Plan, Prediction, Replica, Schedule, Stage, StageMemory


def with_edges(problem: Problem, plan: Plan, edges: Sequence[Sequence[Edge]]) -> Plan:
    """The plan with these edges, one sequence per replica; limits in flight, memory and prediction are made anew.

    Shorter messages mean a shorter period, and then more micro-batches in flight hide the latency. The certificate is
    dropped: it bounds plans that send the same bytes. Raises UserError for a plan of another problem.
    """
    check_same_problem(problem, plan)
    made = [_replica(problem, r, tuple(e)) for r, e in zip(plan.replicas, edges, strict=True)]
    return msgspec.structs.replace(
        plan, replicas=tuple(replica for replica, _ in made), certificate=None,
        predicted=together([predicted for _, predicted in made], plan.predicted.sync_s),
    )  # fmt: skip


def check_same_problem(problem: Problem, plan: Plan) -> None:
    for field, got, expected in (
        ("model", plan.model, problem.flow.graph.name),
        ("fleet", plan.fleet, problem.fleet.name),
        ("micro_batch_size", plan.micro_batch_size, problem.micro_batch_size),
        ("micro_batches", plan.micro_batches, problem.micro_batches),
    ):
        if got != expected:
            raise UserError(f"plan: {field}: got {got!r}, the problem has {expected!r}")


def _replica(problem: Problem, replica: Replica, edges: tuple[Edge, ...]) -> tuple[Replica, Prediction]:
    share = replace(problem, micro_batches=replica.micro_batches)
    devices = [stage.device for stage in replica.stages]
    flops = [(stage.flops_forward, stage.flops_backward) for stage in replica.stages]
    times = pipeline(share, devices, flops, edges, replica.shared)
    held = list(zip(replica.stages, replica.schedule.in_flight, strict=True))
    in_flight = in_flight_limits(share, times, [_room(share, stage, k) for stage, k in held])
    stages = tuple(
        msgspec.structs.replace(stage, memory=_memory(stage, k, now))
        for (stage, k), now in zip(held, in_flight, strict=True)
    )
    made = msgspec.structs.replace(
        replica, stages=stages, edges=edges, schedule=Schedule(replica.schedule.name, in_flight)
    )
    return made, prediction(times, in_flight, replica.micro_batches)


def _memory(stage: Stage, in_flight: int, now: int) -> StageMemory:
    return msgspec.structs.replace(stage.memory, activations=stage.memory.activations // in_flight * now)


def _room(problem: Problem, stage: Stage, in_flight: int) -> Room:
    """`in_flight` is what the stage's memory was stated for."""
    return Room(
        capacity=problem.fleet.device(stage.device).memory_bytes, fixed=stage.memory.total - stage.memory.activations,
        each=stage.memory.activations // in_flight,
    )  # fmt: skip
