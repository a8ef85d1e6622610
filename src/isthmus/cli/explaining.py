"""`isthmus plan JOB`: one plan, printed, explained and drawn. `isthmus graph JOB`: what is planned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console

from isthmus.cli.options import notes
from isthmus.cli.planning import fleet_for, make
from isthmus.cli.planning_shown import planned
from isthmus.errors import UserError
from isthmus.job import Job, prepare
from isthmus.report import draw_plan, explain, explanation_text, plan_overview, plan_table
from isthmus.report.graph_table import graph_table, graph_weights
from isthmus.runtime.conducting.feedback import check_feedback
from isthmus.runtime.conducting.leaving import leaving_text


def show_plan(job: Job, out: Console, *, words: bool, picture: Path | None, json: bool) -> None:
    """With `json` the plan document; with `words` too, both in one object. UserError where no PNG can be written."""
    if picture is not None and not picture.parent.is_dir():  # said before the model is captured, which takes longer
        raise UserError(f"--picture {picture}: {picture.parent} is not a folder")
    fleet, prepared = fleet_for(job), prepare(job)
    problem = prepared.problem(fleet)
    plan = planned(notes(), lambda: make(job, problem), best_so_far=True)
    check_feedback(prepared, plan, fleet)
    leaving = leaving_text(prepared, plan, fleet)
    if picture is not None:
        try:
            draw_plan(plan, fleet, picture)
        except OSError as e:
            raise UserError(f"--picture {picture}: cannot be written: {e.strerror or e}") from None
    explanation = explain(problem.cut_into(plan.micro_batches), plan) if words else None
    if json:
        told = plan if explanation is None else {"plan": plan, "explanation": explanation, "leaving": leaving}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
        return
    if explanation is None:
        out.print(plan_overview(plan, fleet, prepared.captured.train))
    else:
        out.print(plan_table(plan, fleet, prepared.captured.train))
        out.print(explanation_text(explanation))
    for line in leaving:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def show_graph(job: Job, out: Console, *, operators: bool, json: bool) -> None:
    """What each layer, or each operator, computes and keeps."""
    weights = graph_weights(prepare(job).flow, job.micro_batch_size)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(weights), indent=1).decode())
    else:
        out.print(graph_table(weights, operators=operators))
