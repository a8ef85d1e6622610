"""`isthmus plan JOB --verify PLAN.json`: a plan document against figures computed anew."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console

from isthmus.job import Job, fleet_of, prepare, terms_of
from isthmus.plans import load_plan
from isthmus.report import verdict_table
from isthmus.verification import Question, StateBytes, state_bytes, verify
from isthmus.verification.question import FLOAT32_BYTES


def verify_document(
    job: Job, document: Path, out: Console, *, bound_unchecked: bool, json: bool
) -> int:  # fmt: skip
    """The exit code: 0 when every figure holds, 1 when one does not, or when the bound could not be checked unless
    `bound_unchecked` allows it. UserError for what is not a plan document."""
    plan, fleet = load_plan(document), fleet_of(job)
    if plan.micro_batches in job.counts:
        job = job.cut_into(plan.micro_batches)
    prepared = prepare(job)
    question = Question(
        graph=prepared.captured.train, fleet=fleet, micro_batch_size=job.micro_batch_size,
        micro_batches=job.training.micro_batches, schedule=job.schedule, period=job.sync.period,
        state=_state(job), terms=terms_of(job, fleet, prepared.samples.holders), recompute=job.plan.recompute,
        counts=job.counts, gradients=job.sync.mode == "every-step",
    )  # fmt: skip
    verdict = verify(plan, question)
    holds = verdict.holds(bound_unchecked=bound_unchecked)
    if json:
        told = {"holds": holds, **msgspec.to_builtins(verdict)}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
    else:
        out.print(verdict_table(verdict, plan, str(document)))
    return 0 if holds else 1


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
