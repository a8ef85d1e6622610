"""A plan on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from isthmus.api import make_plan
from isthmus.api.observer import Observer
from isthmus.api.search import searched
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job, prepare
from isthmus.plans import Plan
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import SimulationOptions
from isthmus.simulator import simulate as simulate_plan
from isthmus.trace import Trace


class Simulated(NamedTuple):
    trace: Trace
    plan: Plan
    fleet: Fleet
    graph: OpGraph | None
    """None of a plan that was given: the model is not captured for it."""


def simulate_job(job: Job, observer: Observer, stop: Stop, document: Path | None = None) -> Simulated:
    """Of the plan document, or of the plan that is made."""
    fleet = make_plan.fleet_for(job)
    if document is not None:  # a plan says all that the virtual clock needs: the model is not captured
        plan = make_plan.read_plan(job, fleet, document)
        options = SimulationOptions(clips=job.training.exchanges_norms)
        return Simulated(simulate_plan(plan, fleet, make_plan.plan_spec(job, plan), options), plan, fleet, None)
    prepared = prepare(job)
    plan = searched(observer, stop, lambda: make_plan.make(job, prepared.problem(fleet)))
    spec = run_spec(prepared.cut_into(plan.micro_batches))
    trace = simulate_plan(plan, fleet, spec, make_plan.simulation_options(prepared, plan))
    return Simulated(trace, plan, fleet, prepared.captured.train)
