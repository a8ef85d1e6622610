"""One plan, explained. What is planned: the weights of a model's graph."""

from __future__ import annotations

from typing import NamedTuple

from isthmus.api.make_plan import fleet_for, make
from isthmus.api.observer import Observer
from isthmus.api.search import searched
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job, prepare
from isthmus.plans import Plan
from isthmus.report import Explanation, explain
from isthmus.report.graph_table import GraphWeights, graph_weights
from isthmus.runtime.coordinator.activation_privacy import protection_text
from isthmus.runtime.coordinator.private_feedback import check_feedback
from isthmus.runtime.processes.signals import Stop


class Explained(NamedTuple):
    plan: Plan
    fleet: Fleet
    graph: OpGraph
    explanation: Explanation | None
    """Why the plan looks as it does, if that was asked for."""
    leaving: list[str]
    """What leaves the data holders, in words."""


def plan_job(job: Job, observer: Observer, stop: Stop, *, words: bool = False) -> Explained:
    """The plan that the job would be run with; with `words` explained."""
    fleet, prepared = fleet_for(job), prepare(job)
    problem = prepared.problem(fleet)
    plan = searched(observer, stop, lambda: make(job, problem), best_so_far=True)
    check_feedback(prepared, plan, fleet)
    explanation = explain(problem.cut_into(plan.micro_batches), plan) if words else None
    return Explained(plan, fleet, prepared.captured.train, explanation, list(protection_text(prepared, plan, fleet)))


def weigh_model(job: Job) -> GraphWeights:
    """What each layer, and each operator, computes and keeps."""
    return graph_weights(prepare(job).flow, job.micro_batch_size)
