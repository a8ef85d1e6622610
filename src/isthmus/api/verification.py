"""A plan document against figures computed anew."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.job import Job, constraints_of, fleet_of, prepare
from isthmus.plans import Plan, load_plan
from isthmus.verification import Question, StateBytes, Verdict, state_bytes, verify
from isthmus.verification.question import FLOAT32_BYTES


def verify_plan(job: Job, plan: Plan | Path) -> Verdict:
    """Of a plan, or of its document. UserError for what is no plan document."""
    plan, fleet = plan if isinstance(plan, Plan) else load_plan(plan), fleet_of(job)
    if plan.micro_batches in job.counts:
        job = job.cut_into(plan.micro_batches)
    prepared = prepare(job)
    question = Question(
        graph=prepared.captured.train,
        fleet=fleet,
        micro_batch_size=job.micro_batch_size,
        micro_batches=job.training.micro_batches,
        schedule=job.schedule,
        period=job.sync.period,
        state=_state(job),
        constraints=constraints_of(job, fleet, prepared.samples.holders),
        recompute=job.plan.recompute,
        counts=job.counts,
        gradients=job.sync.mode == "every-step",
    )
    return verify(plan, question)


def _state(job: Job) -> StateBytes:
    """Of the optimizer that keeps the most: a stage may hold parameters of any."""
    narrow = job.training.precision != "fp32"
    largest = max(
        (state_bytes(o.name, momentum=o.momentum > 0, narrow=narrow) for o in job.optimizer),
        key=lambda state: state.optimizer,
    )
    outer = job.sync.outer
    tensors = 0 if outer is None else 1 + (outer.momentum > 0)
    return msgspec.structs.replace(largest, optimizer=largest.optimizer + FLOAT32_BYTES * tensors)
