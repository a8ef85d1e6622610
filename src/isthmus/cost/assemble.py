"""From an order of devices and a list of cuts to the whole `Plan`: every number comes from the stage graphs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from isthmus.cost.compute import stage_flops
from isthmus.cost.in_flight import Room, in_flight_limits
from isthmus.cost.memory import micro_batch_bytes, stage_memory
from isthmus.cost.problem import Problem
from isthmus.cost.respect import broken_term
from isthmus.cost.steptime import Pipeline, pipeline, prediction, together
from isthmus.cost.sync import replica_sync, sync_s
from isthmus.cost.transfer import edges_of, shared_parameters
from isthmus.errors import FleetTooSmall, UserError
from isthmus.graph import StageGraph, assign, partition
from isthmus.plan import Certificate, Edge, Plan, Replica, Schedule, SharedParameter, Stage, Sync
from isthmus.units import format_compute, format_size


class Layout(NamedTuple):
    """Where one replica runs: a device per stage, the first operator of every stage but the first, and its share."""

    order: tuple[str, ...]
    boundaries: tuple[int, ...]
    micro_batches: int


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
    """Cut the graph and put stage k on `order[k]`.

    Raises UserError for a wrong order or wrong boundaries, or where they break the problem's terms.
    """
    if len(order) != len(boundaries) + 1:
        raise UserError(f"plan: got {len(order)} devices for {len(boundaries) + 1} stages, expected one each")
    if any(a == b for a, b in itertools.pairwise(order)):
        raise UserError(f"plan: got devices {list(order)}, expected no two neighbours on the same device")
    broken = broken_term(problem, order, boundaries)
    if broken is not None:
        raise UserError(f"plan: {broken}")
    flow = problem.flow
    graphs = partition(flow, assign(flow, boundaries))
    flops = tuple(stage_flops(problem, g) for g in graphs)
    edges = edges_of(flow, graphs, problem.micro_batch_size)
    shared = shared_parameters(flow, graphs)
    return Placement(
        problem, tuple(order), (0, *boundaries, len(flow.operators)), graphs, flops, edges, shared,
        pipeline(problem, order, flops, edges, shared),
    )  # fmt: skip


def layouts_of(plan: Plan) -> list[Layout]:
    """The layouts that `build_replicas` was given."""
    return [
        Layout(tuple(s.device for s in r.stages), tuple(s.first for s in r.stages[1:]), r.micro_batches)
        for r in plan.replicas
    ]


def with_sync(problem: Problem, plan: Plan, sync: Sync) -> Plan:
    """The plan with other sums, its prediction following."""
    predicted, other_s = plan.predicted, sync_s(problem.fleet, sync)
    more_s = other_s - predicted.sync_s
    return msgspec.structs.replace(
        plan, sync=sync,
        predicted=msgspec.structs.replace(
            predicted, sync_s=other_s, step_s=predicted.step_s + more_s, eq3_step_s=predicted.eq3_step_s + more_s
        ),
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
    """The plan that runs operators `boundaries[k-1] .. boundaries[k] - 1` on `order[k]`: a pipeline, one replica.

    `notes` says why, per device; a device without an entry gets the plain facts. Raises FleetTooSmall where a
    stage does not fit even with one micro-batch in flight (GPipe: with all).
    """
    layout = Layout(tuple(order), tuple(boundaries), problem.micro_batches)
    return build_replicas(problem, [layout], planner=planner, certificate=certificate, notes=notes)


def build_replicas(
    problem: Problem,
    layouts: Sequence[Layout],
    *,
    planner: str,
    certificate: Certificate | None = None,
    notes: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of several pipelines that share each batch, as `build_plan` says of one.

    Raises UserError where a device is in two of them, or their micro-batches are not the problem's in sum.
    """
    _check_layouts(problem, layouts)
    placed = [place(_share(problem, x.micro_batches), x.order, x.boundaries) for x in layouts]
    limits = [in_flight_limits(p.problem, p.times, rooms(p)) for p in placed]
    predicted = [prediction(p.times, limit, p.problem.micro_batches) for p, limit in zip(placed, limits, strict=True)]
    sync = replica_sync(problem.flow, problem.fleet, problem.sync, [(p.order, p.graphs) for p in placed])
    return Plan(
        model=problem.flow.graph.name,
        fleet=problem.fleet.name,
        planner=planner,
        micro_batch_size=problem.micro_batch_size,
        micro_batches=problem.micro_batches,
        replicas=tuple(_replica(p, limit) for p, limit in zip(placed, limits, strict=True)),
        sync=sync,
        terms=problem.terms,
        predicted=together(predicted, sync_s(problem.fleet, sync)),
        certificate=certificate,
        notes=tuple(_note(placed, name, (notes or {}).get(name, "")) for name in problem.fleet.names),
    )


def _check_layouts(problem: Problem, layouts: Sequence[Layout]) -> None:
    for device, uses in Counter(name for x in layouts for name in set(x.order)).items():
        if uses > 1:
            raise UserError(f"plan: got device {device!r} in {uses} replicas, expected one")
    got = [x.micro_batches for x in layouts]
    if sum(got) != problem.micro_batches or min(got, default=0) < 1:
        raise UserError(f"plan: got {got} micro-batches, expected {problem.micro_batches} in sum, one each at least")


def _share(problem: Problem, micro_batches: int) -> Problem:
    return problem if micro_batches == problem.micro_batches else replace(problem, micro_batches=micro_batches)


def _replica(placed: Placement, in_flight: tuple[int, ...]) -> Replica:
    return Replica(
        stages=_stages(placed, in_flight), edges=placed.edges, shared=placed.shared,
        micro_batches=placed.problem.micro_batches, schedule=Schedule(placed.problem.schedule, in_flight),
    )  # fmt: skip


def rooms(placed: Placement) -> list[Room]:
    """The memory of each stage and its device; FleetTooSmall where too few micro-batches fit."""
    problem = placed.problem
    found = [
        Room(problem.fleet.device(name).memory_bytes, stage_memory(problem, graph, 0).total,
             micro_batch_bytes(problem, graph))
        for name, graph in zip(placed.order, placed.graphs, strict=True)
    ]  # fmt: skip
    least = problem.micro_batches if problem.schedule == "gpipe" else 1
    for name, stages in placed.times.stages_of.items():
        need, capacity = sum(found[s].fixed + least * found[s].each for s in stages), found[stages[0]].capacity
        if need > capacity:
            which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {' and '.join(map(str, stages))}"
            raise FleetTooSmall(
                f"model {problem.flow.graph.name!r} does not fit fleet {problem.fleet.name!r}: {which} on "
                f"device {name} needs {format_size(need)} with {least} micro-batches in flight, "
                f"has {format_size(capacity)}: {need - capacity} bytes short"
            )
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


def _note(replicas: Sequence[Placement], name: str, why: str) -> str:
    reason = f": {why}" if why else ""
    placed = next((p for p in replicas if name in p.order), None)
    if placed is None:
        return f"{name} is left out{reason}"
    runs = " and ".join(_runs(placed, stage) for stage in placed.times.stages_of[name])
    speed = format_compute(placed.problem.speed(placed.problem.fleet.device(name)))
    return f"{name} runs {runs} at {speed}, {placed.times.device_s[name]:.3g} s per micro-batch{reason}"


def _runs(placed: Placement, stage: int) -> str:
    problem, operators = placed.problem, placed.problem.flow.operators
    first, end = placed.bounds[stage], placed.bounds[stage + 1]
    modules = list(dict.fromkeys(op.module for op in operators[first:end] if op.module))
    where = f" ({modules[0]} .. {modules[-1]})" if len(modules) > 1 else f" ({modules[0]})" if modules else ""
    share = sum(placed.flops[stage]) / max(problem.cumulative_flops[-1], 1)
    return f"operators {first}..{end - 1}{where}, {share:.1%} of the FLOPs"
