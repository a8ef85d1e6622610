"""What commands of a job print."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import typer

from isthmus.api.federated_simulation import simulate_rounds
from isthmus.api.job_plans import compare_planners, describe_data, plan_job, simulate_job, verify_plan, weigh_model
from isthmus.api.stop import Stop
from isthmus.cli.options import notes, out, print_json
from isthmus.cli.terminal import Terminal
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.plans import load_plan
from isthmus.report import (
    compared_table,
    draw_plan,
    explanation_text,
    plan_overview,
    plan_summary,
    plan_table,
    verdict_table,
)
from isthmus.report.federated_progress import simulated_table
from isthmus.report.graph_table import graph_table
from isthmus.trace import busy_share, link_bytes, steady_step_s, write_perfetto
from isthmus.units import format_duration


def show_plan(job: Job, *, words: bool, picture: Path | None, json: bool) -> None:
    """With `json` the plan document; with `words` too, both in one object. UserError where no PNG can be written."""
    if picture is not None and not picture.parent.is_dir():  # said before the model is captured, which takes longer
        raise UserError(f"--picture {picture}: {picture.parent} is not a folder")
    found = plan_job(job, Terminal(out(), notes()), Stop(), words=words)
    plan, fleet, explanation = found.plan, found.fleet, found.explanation
    if picture is not None:
        try:
            draw_plan(plan, fleet, picture)
        except OSError as e:
            raise UserError(f"--picture {picture}: cannot be written: {e.strerror or e}") from None
    if json:
        document = {"plan": plan, "explanation": explanation, "leaving": found.leaving}
        print_json(plan if explanation is None else document)
        return
    if explanation is None:
        out().print(plan_overview(plan, fleet, found.graph))
    else:
        out().print(plan_table(plan, fleet, found.graph))
        out().print(explanation_text(explanation))
    for line in found.leaving:
        out().print(line, highlight=False, soft_wrap=True)


def show_compared(job: Job, planners: str, *, json: bool) -> int:
    """The exit code: 0, or where every planner refused that of the first refusal."""
    found, refusals = compare_planners(job, planners, Terminal(out(), notes()), Stop())
    if json:
        print_json(found)
    else:
        out().print(compared_table(found))
    return 0 if len(refusals) < len(found.rows) else refusals[0].exit_code


def show_verified(job: Job, document: Path, *, bound_unchecked: bool, json: bool) -> int:
    """The exit code: 0 when every figure holds, 1 when one does not, or when the bound could not be checked unless
    `bound_unchecked` allows it."""
    plan = load_plan(document)
    verdict = verify_plan(job, plan)
    holds = verdict.holds(bound_unchecked=bound_unchecked)
    if json:
        print_json({"holds": holds, **msgspec.to_builtins(verdict)})
    else:
        out().print(verdict_table(verdict, plan, str(document)))
    return 0 if holds else 1


def show_graph(job: Job, *, operators: bool, json: bool) -> None:
    weights = weigh_model(job)
    if json:
        print_json(weights)
    else:
        out().print(graph_table(weights, operators=operators))


def show_simulation(job: Job, document: Path | None, trace_file: Path | None, *, json: bool) -> None:
    """`trace_file` is for a trace viewer."""
    trace, plan, fleet, graph = simulate_job(job, Terminal(out(), notes()), Stop(), document)
    if trace_file is not None:
        write_perfetto([trace], trace_file)
    step_s, predicted = steady_step_s(trace), plan.predicted
    if json:
        print_json(
            {
                "step_s": step_s,
                "closed_form_s": predicted.step_s,
                "eq3_s": predicted.eq3_step_s,
                "busy_share": busy_share(trace),
                "link_bytes": {f"{a} -> {b}": n for (a, b), n in link_bytes(trace).items()},
                "plan": msgspec.to_builtins(plan_summary(plan, fleet)),
            }
        )
        return
    out().print(plan_overview(plan, fleet, graph))
    out().print(
        f"simulated step {format_duration(step_s)}, closed form {format_duration(predicted.step_s)}, Eq. 3 "
        f"{format_duration(predicted.eq3_step_s)}",
        highlight=False,
    )
    for device, share in busy_share(trace).items():
        out().print(f"  {device}: computing {share:.0%}", highlight=False)


def write_description(job: Job, target: Path | None) -> None:
    """To the file, or to stdout."""
    text = describe_data(job)
    if target is None:
        typer.echo(text.decode(), nl=False)
        return
    try:
        target.write_bytes(text)
    except OSError as e:
        raise UserError(f"--out {target}: cannot be written: {e.strerror or e}") from None
    notes().print(f'wrote {target}: [data] description = "{target}" plans with it', highlight=False, soft_wrap=True)


def show_simulated_rounds(job: FederatedJob, *, json: bool) -> int:
    """The exit code."""
    rounds, executors, line, overhead_s = simulate_rounds(job)
    if json:
        print_json(
            {
                "rounds": len(rounds),
                "executors": executors,
                "seconds_per_sample": line.seconds_per_sample,
                "fixed_s": line.fixed_s,
                "overhead_s": overhead_s,
                "round_s": statistics.median(r.seconds for r in rounds),
                "total_s": sum(r.seconds for r in rounds),
            }
        )
    else:
        out().print(simulated_table(rounds, line))
    return 0
