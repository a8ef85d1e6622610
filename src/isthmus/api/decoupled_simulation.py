"""Decoupled replicas of a job, simulated: how fast they are together, and what faults cost."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import torch

from isthmus.api.decoupled import plan_again, replica_plans, step_text
from isthmus.api.fault_simulation import fault_text
from isthmus.api.make_plan import predict
from isthmus.api.replica_devices import Planned, PlannedStep
from isthmus.api.replica_simulation import (
    DecoupledSimulation,
    FragmentBytes,
    ReplicaModel,
    SimulatedReplicas,
    check_replica_faults,
)
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, fleet_of, prepare
from isthmus.plans import Plan
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.decoupled.groups import replica_groups
from isthmus.runtime.decoupled.merged_run import merge_rules
from isthmus.runtime.decoupled.pipeline_job import pipeline_prepared
from isthmus.runtime.decoupled.run import check_decoupled, links_of
from isthmus.runtime.decoupled.together import merged_fragments
from isthmus.simulator import Fault
from isthmus.simulator.simulate import check_faults
from isthmus.trace import steady_step_s
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec
from isthmus.units import format_duration

PLANNING_S = 2.0
"""From the loss of a pipeline's device until there is a plan for the others, and their processes are connected: as
benchmarks/everything measured it."""


class DecoupledForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run beside its devices that are never disturbed."""

    run: SimulatedReplicas
    faults: tuple[Fault, ...]
    full_speed: float
    """Samples per second of all devices, none of which ever waits or fails."""
    plans: Mapping[str, Plan]
    """By replica, its first one."""
    step_s: Mapping[str, float]
    """By replica, its step on that plan, as simulated."""

    @property
    def exit_code(self) -> int:
        """That a real run would end with."""
        return PeerError.exit_code if self.run.finish.outcome == "lost" else 0

    @property
    def goodput(self) -> float:
        """Samples per second whose steps are in the result, over the full speed."""
        return self.run.useful_samples / (self.run.seconds * self.full_speed) if self.run.seconds else 0.0

    @property
    def steps(self) -> dict[str, int]:
        """By replica."""
        return dict(sorted(Counter(name for _, name, _ in self.run.steps).items()))

    def timeline(self) -> list[tuple[float, str]]:
        """What happened, in words, by second of the run."""
        happened = [(fault.time_s, fault_text(fault)) for fault in self.faults if fault.time_s <= self.run.seconds]
        return sorted(happened + self.run.notes, key=lambda entry: entry[0])

    def lines(self) -> list[str]:
        """The replicas, what happened, and what came of it."""
        run = self.run
        found = [f"{time_s:8.1f} s  {text}" for time_s, text in self.timeline()]
        too_late = [fault_text(fault) for fault in self.faults if fault.time_s > run.seconds]
        after = [f"after the end of the run, so without effect: {'; '.join(too_late)}"] if too_late else []
        steps = ", ".join(f"{name} {count}" for name, count in self.steps.items())
        return [
            *(step_text(name, plan, self.step_s[name]) for name, plan in self.plans.items()),
            *found,
            *after,
            f"steps: {steps}; {len(run.merges)} merges, {run.late} contributions too late for theirs",
            f"{run.finish.outcome} after {format_duration(run.seconds)}: {100 * self.goodput:.1f} % of what the "
            f"devices could do undisturbed, which computed {100 * run.used:.1f} % of the time that they were there. "
            f"{run.finish.reason}".rstrip(" ."),
        ]

    def summary(self) -> dict[str, object]:
        """As JSON has it."""
        run = self.run
        return {
            "outcome": run.finish.outcome,
            "reason": run.finish.reason,
            "seconds": run.seconds,
            "goodput": self.goodput,
            "used": run.used,
            "useful_samples": run.useful_samples,
            "replicas": {
                name: {"devices": list(plan.used), "step_s": self.step_s[name]} for name, plan in self.plans.items()
            },
            "steps": self.steps,
            "merges": len(run.merges),
            "late_contributions": run.late,
            "timeline": [{"time_s": time_s, "text": text} for time_s, text in self.timeline()],
        }


def simulate_decoupled(job: Job, faults: Sequence[Fault] = ()) -> DecoupledForecast:
    """The job's whole run. UserError for a job that cannot run like this, or a fault that the fleet cannot have."""
    fleet = fleet_of(job)
    check_decoupled(job, fleet)
    check_faults(tuple(faults), fleet)
    check_replica_faults(faults)
    if {fault.device for fault in faults if fault.kind == "join"} >= set(fleet.names):
        raise UserError("--join: got all devices, expected one that is there from the start")
    prepared = prepare(job)
    plans = replica_plans(prepared, fleet)
    models = replica_models(prepared, fleet, plans)
    sizes = fragment_bytes(job, merged_fragments(job))
    run = DecoupledSimulation(merge_rules(job), models, sizes, faults, seed=job.training.seed).run()
    return DecoupledForecast(
        run=run,
        faults=tuple(faults),
        full_speed=sum(model.samples / model.step_s for model in models),
        plans=plans,
        step_s={model.name: model.step_s for model in models},
    )


def replica_models(prepared: Prepared, fleet: Fleet, first: Mapping[str, Plan] | None = None) -> list[ReplicaModel]:
    """The times of the fleet's replicas. `first` are their plans; None: they are made."""
    job, plans = prepared.job, first or replica_plans(prepared, fleet)
    groups = replica_groups(job, fleet)
    planned = {name: _planned_steps(prepared, fleet, plans[name], name) for name in groups if len(groups[name]) > 1}
    step_s = {name: plan.predicted.step_s for name, plan in plans.items()}
    for name, make in planned.items():
        if (step := make(frozenset(groups[name]))) is not None:
            step_s[name] = step.step_s
    samples = job.training.batch_size // len(groups)
    return [
        ReplicaModel(
            name=name,
            step_s=step_s[name],
            samples=samples,
            up=up,
            down=down,
            devices=groups[name],
            planned=planned.get(name),
        )
        for name, (up, down) in links_of(groups, fleet).items()
    ]


def _planned_steps(prepared: Prepared, fleet: Fleet, first: Plan, name: str) -> Planned:
    """Of a replica that is a pipeline: as it would plan on the devices that are there."""
    groups = replica_groups(prepared.job, fleet)
    own = pipeline_prepared(prepared, groups, name)
    known = {frozenset(groups[name]): first}

    @functools.cache
    def planned(present: frozenset[str]) -> PlannedStep | None:
        left = fleet.subset([name for name in fleet.names if name in present]) if present else None
        try:
            plan = None if left is None else known.get(present) or plan_again(own, left)
        except UserError:  # of too little memory, for example
            return None
        if plan is None or left is None:
            return None
        spec = run_spec(own)
        trace = predict(own, plan, left, spec)
        steps = len({span.step for span in trace.spans if span.name == "update"})
        busy_s = dict.fromkeys(plan.used, 0.0)
        for span in trace.spans:
            busy_s[span.device] += (span.end_s - span.start_s) / steps if span.track == "compute" else 0.0
        stages = StageAssignments(own, plan, left)
        begin_s = PLANNING_S + stages.whole_s
        return PlannedStep(steady_step_s(trace), busy_s, begin_s, stages.layout.keep_every)

    return planned


def fragment_bytes(job: Job, merged: MergedFragments) -> FragmentBytes:
    """The sizes of the job's messages."""
    elements, floats = [values.numel() for values in merged.known], torch.float32
    return FragmentBytes(
        delta=tuple(delta_codec(job.sync.decoupled).wire_bytes(n, floats) for n in elements),
        change=tuple(change_codec(job.sync.decoupled).wire_bytes(n, floats) for n in elements),
        whole=tuple(n * floats.itemsize for n in elements),
    )
