"""The times and messages of a job's decoupled replicas, for a simulation of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from isthmus.api.make_plan import plan_for, predict
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared
from isthmus.plans import Plan
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.decoupled.groups import replica_groups
from isthmus.runtime.decoupled.pipeline_job import pipeline_prepared
from isthmus.runtime.decoupled.run import links_of
from isthmus.simulator.merging import FragmentBytes, ReplicaModel
from isthmus.simulator.replica_devices import Planned, PlannedStep
from isthmus.trace import steady_step_s
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec

PLANNING_S = 2.0
"""From the loss of a pipeline's device until there is a plan for the others, and their processes are connected: as
benchmarks/everything measured it."""


def replica_models(prepared: Prepared, fleet: Fleet, plans: Mapping[str, Plan]) -> list[ReplicaModel]:
    """The times of the fleet's replicas. `plans` are their first ones."""
    job = prepared.job
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
    """Return the steps of a replica that is a pipeline: as it would plan on the devices that are there."""
    groups = replica_groups(prepared.job, fleet)
    own = pipeline_prepared(prepared, groups, name)
    known = {frozenset(groups[name]): first}

    @functools.cache
    def planned(present: frozenset[str]) -> PlannedStep | None:
        left = fleet.subset([name for name in fleet.names if name in present]) if present else None
        try:
            plan = None if left is None else known.get(present) or plan_for(own, left, proving=None)
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
        links = frozenset(frozenset((span.device, span.other)) for span in trace.spans if span.track == "send")
        return PlannedStep(steady_step_s(trace, undisturbed=True), busy_s, begin_s, stages.layout.keep_every, links)

    return planned


def fragment_bytes(job: Job, merged: MergedFragments) -> FragmentBytes:
    elements, floats = [values.numel() for values in merged.known], torch.float32
    return FragmentBytes(
        delta=tuple(delta_codec(job.sync.decoupled).wire_bytes(n, floats) for n in elements),
        change=tuple(change_codec(job.sync.decoupled).wire_bytes(n, floats) for n in elements),
        whole=tuple(n * floats.itemsize for n in elements),
    )
