"""A cut graph on its devices, with all durations and sizes: what a `Plan` is made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus.cost.compression import as_requested
from isthmus.cost.compression.messages import Sender
from isthmus.cost.limits import MemoryRoom, broken_constraint
from isthmus.cost.problem import Problem
from isthmus.cost.split_backward import weight_flops
from isthmus.cost.stage_costs import (
    StageBytes,
    StageFlops,
    bytes_of,
    compute_s,
    edges_of,
    shared_parameters,
    stage_flops,
)
from isthmus.cost.steptime import PipelineTime, pipeline
from isthmus.errors import FleetTooSmall, UserError
from isthmus.graph import StageGraph, assign, partition
from isthmus.plans import Edge, SharedParameter
from isthmus.units import format_size


@dataclass(frozen=True)
class Placement:
    """One replica. Stages in order."""

    problem: Problem
    order: tuple[str, ...]
    bounds: tuple[int, ...]
    """0, the boundaries, and the number of operators."""
    graphs: tuple[StageGraph, ...]
    recompute: tuple[bool, ...]
    flops: tuple[StageFlops, ...]
    sizes: tuple[StageBytes, ...]
    edges: tuple[Edge, ...]
    """Packed as the problem asks."""
    shared: tuple[SharedParameter, ...]
    times: PipelineTime


def place(
    problem: Problem, order: Sequence[str], boundaries: Sequence[int], recompute: Sequence[bool] = ()
) -> Placement:
    """Cut the graph and put stage k on `order[k]`; nothing is recomputed unless `recompute` says so, stage by stage.

    Raises UserError for a wrong order or wrong boundaries, where they break the problem's terms, or for a stage that
    recomputes where the problem forbids it.
    """
    if len(order) != len(boundaries) + 1:
        raise UserError(f"plan: got {len(order)} devices for {len(boundaries) + 1} stages, expected one each")
    if any(a == b for a, b in itertools.pairwise(order)):
        raise UserError(f"plan: got devices {list(order)}, expected no two neighbours on the same device")
    broken = broken_constraint(problem, order, boundaries)
    if broken is not None:
        raise UserError(f"plan: {broken}")
    flow = problem.flow
    graphs = partition(flow, assign(flow, boundaries))
    flops = tuple(stage_flops(problem, g) for g in graphs)
    edges = edges_of(flow, graphs, problem.micro_batch_size)
    shared = shared_parameters(flow, graphs)
    placed = _packed(
        Placement(
            problem,
            tuple(order),
            (0, *boundaries, len(flow.operators)),
            graphs,
            (False,) * len(graphs),
            flops,
            tuple(bytes_of(problem, g) for g in graphs),
            edges,
            shared,
            pipeline(problem, order, flops, edges, shared),
        )
    )
    return recomputing(placed, recompute) if recompute else placed


def recomputing(placed: Placement, recompute: Sequence[bool]) -> Placement:
    """The same stages, of which others recompute. UserError as `place` says."""
    if len(recompute) != len(placed.order):
        raise UserError(f"plan: recompute: got {len(recompute)} entries, expected {len(placed.order)}, one per stage")
    if any(recompute) and not placed.problem.recompute:
        stage = list(recompute).index(True)
        raise UserError(f"plan: recompute of stage {stage}: got true, expected false: the problem forbids it")
    changes = zip(placed.graphs, placed.flops, placed.recompute, recompute, strict=True)
    flops = tuple(f if was == now else _other_flops(placed.problem, g, f, again=now) for g, f, was, now in changes)
    if placed.problem.constraints.copied or placed.problem.splits:
        times = pipeline(placed.problem, placed.order, flops, placed.edges, placed.shared)
    else:
        backward_s = tuple(compute_s(placed.problem, d, b) for d, (_, b, _) in zip(placed.order, flops, strict=True))
        times = replace(placed.times, backward_s=backward_s)
    return _packed(replace(placed, recompute=tuple(recompute), flops=flops, times=times))


def _other_flops(problem: Problem, graph: StageGraph, flops: StageFlops, *, again: bool) -> StageFlops:
    """Those of a stage that recomputes, which has nothing apart, or no longer does."""
    if again:
        return StageFlops(flops.forward, flops.backward + flops.forward)
    apart = weight_flops(problem, graph) if problem.splits else 0
    return StageFlops(flops.forward, flops.backward - flops.forward, apart)


def _packed(placed: Placement) -> Placement:
    """With edges as the problem asks: a method may look at all stages and messages of a pipeline."""
    if placed.problem.constraints.compression is None:
        return placed
    sender = Sender(placed.order, placed.edges, max(placed.times.device_s.values()))
    return packed_as(placed, as_requested(placed.problem, sender))


def packed_as(placed: Placement, edges: tuple[Edge, ...]) -> Placement:
    """The same stages with these edges."""
    if edges == placed.edges:
        return placed
    times = pipeline(placed.problem, placed.order, placed.flops, edges, placed.shared)
    return replace(placed, edges=edges, times=times)


def least_in_flight(problem: Problem) -> int:
    """Micro-batches that every stage must be able to hold."""
    return problem.micro_batches if problem.schedule == "gpipe" else 1


def rooms(placed: Placement) -> list[MemoryRoom]:
    """The memory of each stage and its device; FleetTooSmall where too few micro-batches fit."""
    problem, found = placed.problem, room_of_each(placed)
    for name, need in shortages(placed, found).items():
        stages = placed.times.stages_of[name]
        capacity, name = found[stages[0]].capacity, problem.tightest(name)
        which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {' and '.join(map(str, stages))}"
        raise FleetTooSmall(
            f"model {problem.flow.graph.name!r} does not fit fleet {problem.fleet.name!r}: {which} on "
            f"device {name} needs {format_size(need)} with {least_in_flight(problem)} micro-batches in flight, "
            f"offers {format_size(capacity)}{problem.constraints.after_headroom}: {need - capacity} bytes short"
        )
    return found


def room_of_each(placed: Placement) -> list[MemoryRoom]:
    """As `rooms`, also where they do not fit."""
    return [
        MemoryRoom(
            placed.problem.offered_bytes(placed.problem.tightest(name)), size.memory(0, again).total, size.kept(again)
        )
        for name, size, again in zip(placed.order, placed.sizes, placed.recompute, strict=True)
    ]


def shortages(placed: Placement, rooms: Sequence[MemoryRoom]) -> dict[str, int]:
    """Bytes that devices need whose memory does not hold what the schedule asks at least."""
    least = least_in_flight(placed.problem)
    needs = {
        name: sum(rooms[s].fixed + least * rooms[s].each for s in stages)
        for name, stages in placed.times.stages_of.items()
    }
    return {name: need for name, need in needs.items() if need > rooms[placed.times.stages_of[name][0]].capacity}
