"""From an order of devices and a list of cuts to the whole `Plan`: every number comes from the stage graphs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from isthmus.cost.limits import in_flight_limits
from isthmus.cost.placement import Placement, fastest, place, rooms, within_budget
from isthmus.cost.problem import Problem
from isthmus.cost.steptime import prediction, together
from isthmus.cost.sync import copies_sync, replica_sync, sync_s
from isthmus.errors import UserError
from isthmus.expected_loss import packed_note
from isthmus.plans import Constraints, Plan, Prediction, Replica, ReplicaSync, Schedule, Stage
from isthmus.units import format_compute, format_share


class PlanLayout(NamedTuple):
    """One replica: a device per stage, the first operator of every stage but the first, its share of the batch."""

    order: tuple[str, ...]
    boundaries: tuple[int, ...]
    micro_batches: int
    recompute: tuple[bool, ...] | None = None  # per stage; None leaves the choice to the closed form (`cost.placement`)


def layouts_of(plan: Plan) -> list[PlanLayout]:
    """The layouts that `build_replicas` was given, with what it chose."""
    return [
        PlanLayout(
            tuple(s.device for s in r.stages),
            tuple(s.first for s in r.stages[1:]),
            r.micro_batches,
            tuple(s.recompute for s in r.stages),
        )
        for r in plan.replicas
    ]


def with_sync(problem: Problem, plan: Plan, sync: ReplicaSync) -> Plan:
    """The plan with other sums, its prediction following."""
    predicted, other_s = plan.predicted, sync_s(problem.fleet, sync)
    more_s = other_s - predicted.sync_s
    return msgspec.structs.replace(
        plan,
        sync=sync,
        predicted=msgspec.structs.replace(
            predicted, sync_s=other_s, step_s=predicted.step_s + more_s, eq3_step_s=predicted.eq3_step_s + more_s
        ),
    )


def build_plan(
    problem: Problem,
    order: Sequence[str],
    boundaries: Sequence[int],
    *,
    planner: str,
    recompute: Sequence[bool] | None = None,
    notes: Mapping[str, str] | None = None,
) -> Plan:
    """The plan that runs operators `boundaries[k-1] .. boundaries[k] - 1` on `order[k]`: a pipeline, one replica.

    `recompute` is that of `PlanLayout`. `notes` says why, per device; a device without an entry gets the plain facts.
    Raises FleetTooSmall where a stage does not fit even with one micro-batch in flight (GPipe: with all).

    >>> from isthmus.graph import cuts
    >>> from isthmus.job import fleet_of, load_job, prepare
    >>> job = load_job(job_file)
    >>> problem = prepare(job).problem(fleet_of(job))
    >>> legal = cuts(problem.flow)
    >>> middle = legal[len(legal) // 2].position
    >>> plan = build_plan(problem, problem.fleet.names[:2], [middle], planner="halves")
    >>> len(plan.stages)
    2
    """
    again = None if recompute is None else tuple(recompute)
    layout = PlanLayout(tuple(order), tuple(boundaries), problem.micro_batches, again)
    return build_replicas(problem, [layout], planner=planner, notes=notes)


def build_replicas(
    problem: Problem,
    layouts: Sequence[PlanLayout],
    *,
    planner: str,
    notes: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of several pipelines that share each batch, as `build_plan` says of one.

    Raises UserError where a device is in two of them, their micro-batches are not the problem's in sum, or there are
    several although replicas cannot sum the model's parameters.
    """
    _check_layouts(problem, layouts)
    placed = [placed_as(problem, x) for x in layouts]
    if problem.constraints.copied:
        sync = copies_sync(problem.flow, problem.fleet, problem.constraints, placed[0].graphs)
    else:
        sync = replica_sync(problem.flow, problem.fleet, problem.sync, [(p.order, p.graphs) for p in placed])
    averaging_s = sync_s(problem.fleet, sync)
    placed = within_budget(placed, averaging_s)
    replicas, predicted = built(placed)
    all_notes = [_note(placed, name, (notes or {}).get(name, "")) for name in problem.fleet.names]
    if problem.constraints.compression is not None:
        all_notes.append(packed_note(problem.constraints.compression, replicas))
    return Plan(
        model=problem.flow.graph.name,
        fleet=problem.fleet.name,
        planner=planner,
        micro_batch_size=problem.micro_batch_size,
        micro_batches=problem.micro_batches,
        replicas=replicas,
        sync=sync,
        constraints=problem.constraints,
        predicted=together(predicted, averaging_s),
        notes=tuple(all_notes),
    )


def built(placed: Sequence[Placement]) -> tuple[tuple[Replica, ...], list[Prediction]]:
    """The replicas with their limits in flight, and what each takes for itself, without averaging. FleetTooSmall where
    too few micro-batches fit."""
    limits = [in_flight_limits(p.problem, p.times, rooms(p)) for p in placed]
    replicas = tuple(_replica(p, limit) for p, limit in zip(placed, limits, strict=True))
    return replicas, [prediction(p.times, x, p.problem.micro_batches) for p, x in zip(placed, limits, strict=True)]


def _check_layouts(problem: Problem, layouts: Sequence[PlanLayout]) -> None:
    for device, uses in Counter(name for x in layouts for name in set(x.order)).items():
        if uses > 1:
            raise UserError(f"plan: got device {device!r} in {uses} replicas, expected one")
    if len(layouts) > 1 and problem.constraints.feeders:
        raise UserError(f"plan: got {len(layouts)} replicas, expected one, which all holders feed")
    if len(layouts) > 1 and problem.not_summed is not None:
        raise UserError(f"plan: got {len(layouts)} replicas, expected one: {problem.not_summed}")
    got = [x.micro_batches for x in layouts]
    if sum(got) != problem.micro_batches or min(got, default=0) < 1:
        raise UserError(f"plan: got {got} micro-batches, expected {problem.micro_batches} in sum, one each at least")


def placed_as(problem: Problem, layout: PlanLayout) -> Placement:
    """One replica, laid out so."""
    count = layout.micro_batches
    share = problem if count == problem.micro_batches else replace(problem, micro_batches=count)
    placed = place(share, layout.order, layout.boundaries, layout.recompute or ())
    return fastest(placed) if layout.recompute is None else placed


def _replica(placed: Placement, in_flight: tuple[int, ...]) -> Replica:
    stages = _stages(placed, in_flight)
    apart = tuple(f.apart for f in placed.flops) if placed.problem.splits else ()
    return Replica(
        stages=stages,
        copies=copies_of(placed.problem.constraints, stages),
        edges=placed.edges,
        shared=placed.shared,
        micro_batches=placed.problem.micro_batches,
        schedule=Schedule(placed.problem.schedule, in_flight, apart),
    )


def copies_of(constraints: Constraints, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the copies of a chain's stages on the holders that feed it beside the first: see `Replica.copies`."""
    copied = [stages[0], *([stages[-1]] if constraints.labels_stay and len(stages) > 1 else [])]
    return tuple(
        msgspec.structs.replace(stage, device=feeder) for stage in copied for feeder in constraints.feeders[1:]
    )


def _stages(placed: Placement, in_flight: Sequence[int]) -> tuple[Stage, ...]:
    operators = placed.problem.flow.operators
    found: list[Stage] = []
    for graph, (first, end) in zip(placed.graphs, itertools.pairwise(placed.bounds), strict=True):
        forward, backward, _ = placed.flops[graph.index]
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
                memory=placed.sizes[graph.index].memory(in_flight[graph.index], placed.recompute[graph.index]),
                recompute=placed.recompute[graph.index],
            )
        )
    return tuple(found)


def _note(replicas: Sequence[Placement], name: str, why: str) -> str:
    lacked = ", ".join(sorted(replicas[0].problem.constraints.lacked_by(name)))
    reason = f": {why or f'it lacks {lacked}'}" if why or lacked else ""
    placed = next((p for p in replicas if name in p.times.device_s), None)
    if placed is None:
        return f"{name} is left out{reason}"
    if name in placed.problem.constraints.feeders[1:]:
        first = placed.problem.constraints.feeders[0]
        return f"{name} runs what {first} does, on its own data: {_share(placed.problem, name)} of the micro-batches"
    runs = " and ".join(_runs(placed, stage) for stage in placed.times.stages_of[name])
    speed = format_compute(placed.problem.fleet.device(name).sustained_flops_per_s)
    return f"{name} runs {runs} at {speed}, {placed.times.device_s[name]:.3g} s per micro-batch{reason}"


def _share(problem: Problem, feeder: str) -> str:
    return format_share(problem.constraints.shares[problem.constraints.feeders.index(feeder)])


def _runs(placed: Placement, stage: int) -> str:
    problem, operators = placed.problem, placed.problem.flow.operators
    first, end = placed.bounds[stage], placed.bounds[stage + 1]
    modules = list(dict.fromkeys(op.module for op in operators[first:end] if op.module))
    where = f" ({modules[0]} .. {modules[-1]})" if len(modules) > 1 else f" ({modules[0]})" if modules else ""
    share = (problem.cumulative_flops[end] - problem.cumulative_flops[first]) / max(problem.cumulative_flops[-1], 1)
    again = ", its forward twice for want of memory" if placed.recompute[stage] else ""
    return f"operators {first}..{end - 1}{where}, {share:.1%} of the FLOPs{again}"
