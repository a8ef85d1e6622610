"""From an order of devices and a list of cuts to the whole `Plan`: every number comes from the stage graphs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.cost.compute import stage_flops
from isthmus.cost.memory import micro_batch_bytes, stage_memory
from isthmus.cost.problem import Problem
from isthmus.cost.steptime import Pipeline, in_flight_limits, pipeline
from isthmus.cost.transfer import edges_of, shared_parameters
from isthmus.errors import FleetTooSmall, UserError
from isthmus.graph import StageGraph, assign, partition
from isthmus.plan import Certificate, Edge, Plan, Prediction, Replica, Schedule, SharedParameter, Stage
from isthmus.units import format_compute, format_size


@dataclass(frozen=True)
class Placement:
    """A cut graph on its devices, with durations; what a `Plan` is made of."""

    problem: Problem
    order: tuple[str, ...]
    bounds: tuple[int, ...]
    """0, the boundaries, and the number of operators."""
    graphs: tuple[StageGraph, ...]
    flops: tuple[tuple[int, int], ...]
    edges: tuple[Edge, ...]
    shared: tuple[SharedParameter, ...]
    times: Pipeline


def place(problem: Problem, order: Sequence[str], boundaries: Sequence[int]) -> Placement:
    """Cut the graph and put stage k on `order[k]`. Raises UserError for a wrong order or wrong boundaries."""
    if len(order) != len(boundaries) + 1:
        raise UserError(f"plan: got {len(order)} devices for {len(boundaries) + 1} stages, expected one each")
    if len(set(order)) != len(order):
        raise UserError(f"plan: got devices {list(order)}, expected each at most once")
    flow = problem.flow
    graphs = partition(flow, assign(flow, boundaries))
    flops = tuple(stage_flops(problem, g) for g in graphs)
    edges = edges_of(flow, graphs, problem.micro_batch_size)
    shared = shared_parameters(flow, graphs)
    return Placement(
        problem, tuple(order), (0, *boundaries, len(flow.operators)), graphs, flops, edges, shared,
        pipeline(problem, order, flops, edges, shared),
    )  # fmt: skip


def build_plan(
    problem: Problem,
    order: Sequence[str],
    boundaries: Sequence[int],
    *,
    planner: str,
    certificate: Certificate | None = None,
    notes: Mapping[str, str] | None = None,
) -> Plan:
    """The plan that runs operators `boundaries[k-1] .. boundaries[k] - 1` on `order[k]`.

    `notes` says why, per device; a device without an entry gets the plain facts. Raises FleetTooSmall where a
    stage does not fit even with one micro-batch in flight (GPipe: with all).
    """
    placed = place(problem, order, boundaries)
    in_flight = in_flight_limits(problem, placed.times, memory_allows(placed))
    return Plan(
        model=problem.flow.graph.name,
        fleet=problem.fleet.name,
        planner=planner,
        micro_batch_size=problem.micro_batch_size,
        micro_batches=problem.micro_batches,
        schedule=Schedule(problem.schedule, in_flight),
        replicas=(Replica(stages=_stages(placed, in_flight), edges=placed.edges, shared=placed.shared),),
        predicted=_predict(placed, in_flight),
        certificate=certificate,
        notes=tuple(_note(placed, name, (notes or {}).get(name, "")) for name in problem.fleet.names),
    )


def memory_allows(placed: Placement) -> list[int]:
    """How many micro-batches in flight fit each stage's device; FleetTooSmall where too few do."""
    problem, found = placed.problem, list[int]()
    least = problem.micro_batches if problem.schedule == "gpipe" else 1
    for name, graph in zip(placed.order, placed.graphs, strict=True):
        capacity = problem.fleet.device(name).memory_bytes
        fixed, each = stage_memory(problem, graph, 0).total, micro_batch_bytes(problem, graph)
        short = fixed + least * each - capacity
        if short > 0:
            raise FleetTooSmall(
                f"model {problem.flow.graph.name!r} does not fit fleet {problem.fleet.name!r}: stage {graph.index} on "
                f"device {name} needs {format_size(fixed + least * each)} with {least} micro-batches in flight, "
                f"has {format_size(capacity)}: {short} bytes short"
            )
        found.append((capacity - fixed) // each if each else problem.micro_batches)
    return found


def _stages(placed: Placement, in_flight: Sequence[int]) -> tuple[Stage, ...]:
    operators = placed.problem.flow.operators
    found: list[Stage] = []
    for graph, (first, end) in zip(placed.graphs, itertools.pairwise(placed.bounds), strict=True):
        forward, backward = placed.flops[graph.index]
        parameters = [op for op in graph.variables() if op.kind == "parameter"]
        found.append(
            Stage(
                device=placed.order[graph.index],
                first=first,
                last=end - 1,
                first_op=operators[first].name,
                last_op=operators[end - 1].name,
                flops_forward=forward,
                flops_backward=backward,
                parameter_bytes=sum(op.outputs[0].nbytes(1) for op in parameters),
                memory=stage_memory(placed.problem, graph, in_flight[graph.index]),
            )
        )
    return tuple(found)


def _predict(placed: Placement, in_flight: Sequence[int]) -> Prediction:
    times, count = placed.times, placed.problem.micro_batches
    period = times.throttled_period_s(in_flight, count)
    slowest, bottleneck = times.bottleneck
    if period > slowest:
        held_up = max(range(len(in_flight)), key=lambda s: times.round_trips_s[s] / in_flight[s])
        bottleneck = f"memory of device {placed.order[held_up]} ({in_flight[held_up]} micro-batches in flight)"
    return Prediction(
        step_s=times.step_s(count, period),
        period_s=period,
        fill_s=times.fill_s,
        eq3_step_s=times.eq3_step_s(count),
        bottleneck=bottleneck,
    )


def _note(placed: Placement, name: str, why: str) -> str:
    reason = f": {why}" if why else ""
    if name not in placed.order:
        return f"{name} is left out{reason}"
    index = placed.order.index(name)
    problem, operators = placed.problem, placed.problem.flow.operators
    first, end = placed.bounds[index], placed.bounds[index + 1]
    modules = list(dict.fromkeys(op.module for op in operators[first:end] if op.module))
    where = f" ({modules[0]} .. {modules[-1]})" if len(modules) > 1 else f" ({modules[0]})" if modules else ""
    share = sum(placed.flops[index]) / max(problem.cumulative_flops[-1], 1)
    speed = format_compute(problem.speed(problem.fleet.device(name)))
    return (
        f"{name} runs operators {first}..{end - 1}{where}, {share:.1%} of the FLOPs at {speed}, "
        f"{placed.times.compute_s[index]:.3g} s per micro-batch{reason}"
    )
