"""Which plan a command works with, and what the simulator says of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from isthmus.cost import build_plan
from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, fleet_of
from isthmus.plan import Plan, load_plan
from isthmus.planners import plan as make_plan
from isthmus.planners import planner_names
from isthmus.protocol import RunSpec
from isthmus.runtime.stages import refuse_compression, stage_pairs
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import Trace, busy_share, steady_step_s
from isthmus.units import format_duration

SIMULATED_STEPS = 8
HEADER_BYTES = 400
"""A frame's prefix and header, about: it matters on slow links with small tensors only."""


def fleet_for(job: Job) -> Fleet:
    """The job's fleet. It and the planner's name are checked before the model is captured, which takes longer."""
    if job.planner not in planner_names():
        raise unknown_name("planner", job.planner, planner_names())
    return fleet_of(job)


def plan_for(prepared: Prepared, fleet: Fleet, document: Path | None = None) -> Plan:
    """A new plan to run; or the one in the document, where people may have moved cuts, swapped devices or set limits.

    Where cuts or devices were edited, all else is computed anew. UserError for several replicas.
    """
    if document is None:
        return _runnable(make_plan(prepared.job.planner, prepared.problem(fleet)), f"planner {prepared.job.planner!r}")
    plan, problem = read_plan(prepared.job, fleet, document), prepared.problem(fleet)
    _runnable(plan, f"plan file {document}")
    last = len(problem.flow.operators) - 1
    ends = [-1, *(stage.last for stage in plan.stages)]
    if any(stage.first != end + 1 for stage, end in zip(plan.stages, ends, strict=False)) or ends[-1] != last:
        ranges = ", ".join(f"{stage.first}..{stage.last}" for stage in plan.stages)
        raise UserError(
            f"plan file {document}: stages run operators {ranges}, the model has 0..{last}, each in one stage: "
            "it was made for another model, or an edit left a gap"
        )
    try:
        again = build_plan(problem, [s.device for s in plan.stages], plan.boundaries(), planner=plan.planner)
    except UserError as e:
        raise type(e)(f"plan file {document}: {e}") from None
    as_limited = msgspec.structs.replace(again.replica, schedule=plan.replica.schedule)
    if (as_limited, again.predicted) == (plan.replica, plan.predicted):
        return plan
    note = f"{document.name} is not as planner {plan.planner} left it: all figures were computed anew"
    return msgspec.structs.replace(again, notes=(*again.notes, note))


def _runnable(plan: Plan, source: str) -> Plan:
    if len(plan.replicas) != 1:
        raise UserError(
            f"{source}: replicas: got {len(plan.replicas)}, expected 1: a run takes one replica, several can be "
            "planned and simulated; planner 'chain' makes one"
        )
    refuse_compression(plan, source)
    return plan


def read_plan(job: Job, fleet: Fleet, document: Path) -> Plan:
    """A plan document; UserError when it is for another model, batch or schedule, or names an unknown device."""
    plan = load_plan(document)
    if not plan.replicas:
        raise UserError(f"plan file {document}: replicas: got none, expected at least one")
    for field, got, expected in (
        ("model", plan.model, job.model.name),
        ("micro_batches", plan.micro_batches, job.training.micro_batches),
        ("micro_batch_size", plan.micro_batch_size, job.micro_batch_size),
        ("schedule.name", plan.replicas[0].schedule.name, job.schedule),
    ):
        if got != expected:
            raise UserError(f"plan file {document}: {field}: got {got!r}, the job has {expected!r}")
    unknown = [device for device in plan.devices if device not in fleet.names]
    if unknown:
        raise UserError(f"plan file {document}: {unknown_name('device', unknown[0], fleet.names)}")
    return plan


def plan_spec(job: Job) -> RunSpec:
    """The job's training steps alone: what a plan without its model can be simulated for."""
    t = job.training
    return RunSpec(steps=t.steps, micro_batches=t.micro_batches, micro_batch_size=job.micro_batch_size)


def simulation_options(prepared: Prepared, plan: Plan) -> SimulationOptions:
    """The simulator's view of the job. Of several replicas, evaluations send what training sends."""
    if len(plan.replicas) > 1:
        return _options(prepared, None)
    pairs = stage_pairs(plan, prepared.captured, clips=prepared.job.training.clip_norm > 0)
    size = prepared.job.micro_batch_size
    edges: dict[tuple[int, int], int] = {}
    for pair in pairs:
        for crossing in pair.evaluation.sends:
            key = (crossing.source, crossing.target)
            edges[key] = edges.get(key, 0) + crossing.spec.nbytes(size)
    return _options(prepared, edges)


def _options(prepared: Prepared, eval_edges: dict[tuple[int, int], int] | None) -> SimulationOptions:
    return SimulationOptions(
        clips=prepared.job.training.clip_norm > 0, counts=prepared.captured.train.count is not None,
        eval_edges=eval_edges, header_bytes=HEADER_BYTES,
    )  # fmt: skip


def predict(prepared: Prepared, plan: Plan, fleet: Fleet, spec: RunSpec) -> Trace:
    """A few steps of the run on the virtual clock."""
    steps = min(spec.steps, spec.start_step + SIMULATED_STEPS)
    return simulate(plan, fleet, msgspec.structs.replace(spec, steps=steps), simulation_options(prepared, plan))


def print_simulation(console: Console, trace: Trace, plan: Plan) -> None:
    console.print(
        f"simulated step {format_duration(steady_step_s(trace))}, closed form "
        f"{format_duration(plan.predicted.step_s)}, Eq. 3 {format_duration(plan.predicted.eq3_step_s)}",
        highlight=False,
    )
    for device, share in busy_share(trace).items():
        console.print(f"  {device}: computing {share:.0%}", highlight=False, markup=False)
