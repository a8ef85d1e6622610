"""`isthmus simulate JOB`: the plan on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console

from isthmus.cli import planning
from isthmus.cli.options import notes
from isthmus.cli.planning_shown import planned
from isthmus.job import Job, prepare
from isthmus.report import plan_overview, plan_summary
from isthmus.runtime.conducting.run import run_spec
from isthmus.simulator import SimulationOptions
from isthmus.simulator import simulate as simulate_plan
from isthmus.trace import busy_share, link_bytes, steady_step_s, write_perfetto

STEPS = 4


def simulate(job: Job, plan_file: Path | None, trace_file: Path | None, out: Console, *, json: bool) -> None:
    """Of the plan document, or of the plan that is made; `trace_file` is for a trace viewer."""
    fleet = planning.fleet_for(job)
    if plan_file is not None:  # a plan says all that the virtual clock needs: the model is not captured
        found, graph = planning.read_plan(job, fleet, plan_file), None
        options = SimulationOptions(clips=job.training.exchanges_norms)
        trace = simulate_plan(found, fleet, planning.plan_spec(job, found), options)
    else:
        prepared = prepare(job)
        found = planned(notes(), lambda: planning.make(job, prepared.problem(fleet)))
        graph = prepared.captured.train
        spec = run_spec(prepared.cut_into(found.micro_batches))
        trace = simulate_plan(found, fleet, spec, planning.simulation_options(prepared, found))
    if trace_file is not None:
        write_perfetto([trace], trace_file)
    if not json:
        out.print(plan_overview(found, fleet, graph))
        planning.print_simulation(out, trace, found)
        return
    told = {
        "step_s": steady_step_s(trace),
        "closed_form_s": found.predicted.step_s,
        "eq3_s": found.predicted.eq3_step_s,
        "busy_share": busy_share(trace),
        "link_bytes": {f"{a} -> {b}": n for (a, b), n in link_bytes(trace).items()},
        "plan": msgspec.to_builtins(plan_summary(found, fleet)),
    }
    typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
