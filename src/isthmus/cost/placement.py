"""A cut graph on its devices, with all durations and sizes: what a `Plan` is made of.

A placement leaves two choices open: which stages recompute (`fastest`), and which codecs the messages of replicas take
within a loss budget (`within_budget`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from isthmus.cost.compression import as_requested, with_asked_feedback
from isthmus.cost.compression.just_enough import choices_within
from isthmus.cost.compression.messages import Sender, packed_edges
from isthmus.cost.limits import MemoryRoom, broken_constraint, in_flight_limits
from isthmus.cost.problem import Problem
from isthmus.cost.stage_costs import StageBytes, StageFlops, bytes_of, edges_of, shared_parameters, stage_flops
from isthmus.cost.steptime import PipelineTime, pipeline, prediction
from isthmus.errors import FleetTooSmall, UserError
from isthmus.expected_loss import more_steps, packed_increase
from isthmus.graph import StageGraph, assign, partition
from isthmus.plans import Edge, SharedParameter
from isthmus.units import format_size

MOST_SHARING = 8  # stages up to which every choice is tried where two are on one device
ROUNDING = 1e-12  # relative: a step that is shorter by no more is as long


@dataclass(frozen=True)
class Placement:
    """One replica. Stages in order."""

    problem: Problem
    order: tuple[str, ...]
    bounds: tuple[int, ...]  # 0, the boundaries, and the number of operators
    graphs: tuple[StageGraph, ...]
    recompute: tuple[bool, ...]
    flops: tuple[StageFlops, ...]
    sizes: tuple[StageBytes, ...]
    edges: tuple[Edge, ...]  # packed as the problem asks
    shared: tuple[SharedParameter, ...]
    times: PipelineTime

    @property
    def sender(self) -> Sender:
        return Sender(self.order, self.edges, max(self.times.device_s.values()))


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
    flops = tuple(f if was == now else stage_flops(placed.problem, g, recompute=now) for g, f, was, now in changes)
    times = pipeline(placed.problem, placed.order, flops, placed.edges, placed.shared)
    return _packed(replace(placed, recompute=tuple(recompute), flops=flops, times=times))


def _packed(placed: Placement) -> Placement:
    """With edges as the problem asks: a method may look at all stages and messages of a pipeline."""
    if placed.problem.constraints.compression is None:
        return placed
    return packed_as(placed, as_requested(placed.problem, placed.sender))


def packed_as(placed: Placement, edges: tuple[Edge, ...]) -> Placement:
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
            f"offers {format_size(capacity)}{problem.constraints.after_headroom}: {format_size(need - capacity)} short"
        )
    return found


def room_of_each(placed: Placement) -> list[MemoryRoom]:
    """Return the same as `rooms`, also where they do not fit."""
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


def fastest(placed: Placement) -> Placement:
    """The placement with the stages recomputing that make its step shortest, in the closed form.

    A stage that recomputes runs its forward again before its backward, and keeps only what it received in between. That
    costs its forward once more per micro-batch, and leaves room for more micro-batches in flight (activation
    checkpointing, Chen et al. 2016, with a stage as the segment). So it pays where memory throttles the pipeline, or
    where the schedule fixes the number in flight and nothing else fits.

    Begin with the stages that do not fit otherwise. More of them only lengthen the fill and the round trips. So to beat
    the best choice yet takes a period below the one with which this fill would tie; a stage whose round trip over the
    micro-batches that it holds is not below must recompute in every such choice, and a device or link that is busy for
    longer ends the search. Adding just these stages misses nothing, and takes no more rounds than there are stages.

    That is exact where every stage has a device of its own. Where two share one's memory, all choices are tried, up to
    `MOST_SHARING` stages.
    """
    if not placed.problem.recompute:
        return placed
    if len(placed.times.stages_of) < len(placed.order) <= MOST_SHARING:
        return _best_of_all(placed)
    count = placed.problem.micro_batches
    short = shortages(placed, room_of_each(placed))
    now = recomputing(placed, [name in short for name in placed.order])
    best, best_s = now, float("inf")
    while True:
        limits = _limits(now)
        if limits is None:
            return best
        period_s = now.times.throttled_period_s(limits, count)
        step_s = now.times.step_s(count, period_s)
        if step_s < best_s * (1 - ROUNDING):
            best, best_s = now, step_s
        if count == 1:
            return best
        tie_s = min(period_s, period_s - (step_s - best_s) / (count - 1))
        held_up = now.times.held_up_s(limits, count)
        must = [held_up.get(stage, 0.0) >= tie_s for stage in range(len(limits))]
        stuck = any(m and chosen for m, chosen in zip(must, now.recompute, strict=True))
        if stuck or now.times.bottleneck[0] >= tie_s:
            return best
        now = recomputing(now, [m or chosen for m, chosen in zip(must, now.recompute, strict=True)])


def _best_of_all(placed: Placement) -> Placement:
    if _step_s(placed) <= placed.times.step_s(placed.problem.micro_batches):
        return placed  # nothing throttles it, and all else is slower
    choices = itertools.product((False, True), repeat=len(placed.order))
    return min((recomputing(placed, chosen) for chosen in choices), key=_step_s)


def _step_s(placed: Placement) -> float:
    """Infinite where it does not fit."""
    limits, count = _limits(placed), placed.problem.micro_batches
    if limits is None:
        return float("inf")
    return placed.times.step_s(count, placed.times.throttled_period_s(limits, count))


def _limits(placed: Placement) -> tuple[int, ...] | None:
    """Micro-batches in flight per stage; None where it does not fit."""
    found = room_of_each(placed)
    return None if shortages(placed, found) else in_flight_limits(placed.problem, placed.times, found)


class _Packed(NamedTuple):
    """One replica under one choice of codecs."""

    step_s: float
    increase: float  # expected, of the plan: the replica's times its share of the batch
    placed: Placement


def within_budget(placed: Sequence[Placement], averaging_s: float) -> list[Placement]:
    """The replicas of a plan with the codecs of the least time to a loss that its budget allows, where averaging takes
    so many seconds of a step. As they are where no budget is asked for.

    The expected loss of a plan is the mean over its samples, so a replica's increase counts by its share of the batch,
    and one that packs nothing leaves its part to others: replicas over fast links leave the budget to those over slow
    ones. A higher loss takes more steps, so the codecs are those of the least time to a loss:

        the least  (T + averaging) * more_steps(x)
        where  x = sum over r of m_r / n * (the least increase of replica r with a step of at most T)  <=  budget
    """
    asked = placed[0].problem.constraints.compression
    if asked is None or asked.loss_budget is None:
        return list(placed)
    count = sum(p.problem.micro_batches for p in placed)
    options = [(number, option) for number, p in enumerate(placed) for option in _options(p, asked.loss_budget, count)]
    mildest: dict[int, _Packed] = {}
    best: tuple[float, list[_Packed]] = math.inf, []
    for number, option in sorted(options, key=lambda pair: (pair[1].step_s, pair[1].increase)):
        if number in mildest and mildest[number].increase <= option.increase:
            continue
        mildest[number] = option
        increase = sum(o.increase for o in mildest.values())
        if len(mildest) == len(placed) and increase <= asked.loss_budget:
            step_s = max(o.step_s for o in mildest.values()) + averaging_s
            if step_s * more_steps(increase) < best[0]:
                best = step_s * more_steps(increase), [mildest[r] for r in range(len(placed))]
    return [option.placed for option in best[1]]


def _options(placed: Placement, budget: float, count: int) -> Iterator[_Packed]:
    """Messages as they are among them. The batch has `count` micro-batches."""
    problem = placed.problem
    asked = problem.constraints.compression
    assert asked is not None, "a budget is one of compression"
    for packings in choices_within(problem, placed.sender, asked.ratio, budget):
        edges = with_asked_feedback(asked, packed_edges(placed.sender, packings))
        made = packed_as(placed, edges)
        limits = in_flight_limits(problem, made.times, rooms(made))
        step_s = prediction(made.times, limits, problem.micro_batches).step_s
        yield _Packed(step_s, packed_increase(edges) * problem.micro_batches / count, made)
