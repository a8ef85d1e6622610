"""`isthmus plan`, `simulate` and `train`: of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from isthmus.cli import comparing, explaining, federated, federated_simulating, planning, training, verifying
from isthmus.cli.chosen import chosen_job
from isthmus.cli.options import (
    DevicesOption,
    FleetOption,
    JobFile,
    JsonOption,
    ObjectiveOption,
    PlannerOption,
    StepsOption,
    local_path,
    notes,
    out,
)
from isthmus.errors import UserError
from isthmus.federated.job import is_federated
from isthmus.job import prepare
from isthmus.report import plan_summary, plan_table
from isthmus.report.graph_table import graph_table, graph_weights
from isthmus.runtime.conducting.run import run_spec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import busy_share, link_bytes, steady_step_s, write_perfetto

app = typer.Typer()

SIMULATED_STEPS = 4


@app.command()
def plan(
    job_file: JobFile,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    devices: DevicesOption = None,
    objective: ObjectiveOption = None,
    compare: Annotated[str | None, typer.Option("--compare", help="`all`, or planners parted by commas.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the plan looks as it does.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", parser=local_path, metavar="FILE", help="Draw the plan on its fleet: a PNG."),
    ] = None,
    verify: Annotated[Path | None, typer.Option("--verify", help="Check a plan document, figure by figure.")] = None,
    bound_unchecked: Annotated[
        bool, typer.Option("--bound-unchecked", help="With --verify: pass a bound that takes too much work to check.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Plan where each part of the model runs; or compare planners, or check a plan.

    With --json: the plan document.
    """
    job = chosen_job(job_file, fleet, planner, devices, objective=objective)
    alone = [name for name, given in (("--compare", compare), ("--verify", verify)) if given is not None]
    extra = [name for name, given in (("--explain", explain), ("--picture", picture is not None)) if given]
    if alone and len(alone) + len(extra) > 1:
        raise UserError(f"plan: got {' and '.join([*alone, *extra])}, expected {alone[0]} without the others")
    if bound_unchecked and verify is None:
        raise UserError("plan: --bound-unchecked is for --verify")
    if compare is not None:
        raise typer.Exit(comparing.compare(job, compare, out(), json=json))
    if verify is not None:
        raise typer.Exit(verifying.verify_document(job, verify, out(), bound_unchecked=bound_unchecked, json=json))
    explaining.show_plan(job, out(), words=explain, picture=picture, json=json)


@app.command(name="simulate")
def simulate_command(
    job_file: JobFile,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    devices: DevicesOption = None,
    objective: ObjectiveOption = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps to simulate; default 4.")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan document, in place of planning.")] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", parser=local_path, metavar="FILE", help="Write a Perfetto trace here.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run the plan on a virtual clock: the same machines as a real run, with modelled durations.

    Of a job with a table [federated]: its rounds, with clients' times as measured on this machine.
    """
    if is_federated(job_file):
        other = {"--fleet": fleet, "--planner": planner, "--devices": devices, "--objective": objective}
        federated.refuse_options({**other, "--steps": steps, "--plan": plan_file, "--trace": trace_file})
        fed_job = federated.read_job(job_file, federated.FederatedChoices())
        raise typer.Exit(federated_simulating.simulate(fed_job, out(), json=json))
    job = chosen_job(job_file, fleet, planner, devices, steps or SIMULATED_STEPS, objective)
    chosen = planning.fleet_for(job)
    if plan_file is not None:  # a plan says all that the virtual clock needs: the model is not captured
        found, graph = planning.read_plan(job, chosen, plan_file), None
        options = SimulationOptions(clips=job.training.exchanges_norms)
        trace = simulate(found, chosen, planning.plan_spec(job, found), options)
    else:
        prepared = prepare(job)
        found, graph = planning.make(job, prepared.problem(chosen)), prepared.captured.train
        spec = run_spec(prepared.cut_into(found.micro_batches))
        trace = simulate(found, chosen, spec, planning.simulation_options(prepared, found))
    if trace_file is not None:
        write_perfetto([trace], trace_file)
    if json:
        typer.echo(
            msgspec.json.format(
                msgspec.json.encode(
                    {
                        "step_s": steady_step_s(trace),
                        "closed_form_s": found.predicted.step_s,
                        "eq3_s": found.predicted.eq3_step_s,
                        "busy_share": busy_share(trace),
                        "link_bytes": {f"{a} -> {b}": n for (a, b), n in link_bytes(trace).items()},
                        "plan": msgspec.to_builtins(plan_summary(found, chosen)),
                    }
                ),
                indent=1,
            ).decode()
        )
    else:
        out().print(plan_table(found, chosen, graph))
        planning.print_simulation(out(), trace, found)


@app.command()
def graph(
    job_file: JobFile,
    operators: Annotated[bool, typer.Option("--operators", help="Every operator, not only layers.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what each layer of a job's model computes and keeps. With --json: every operator too."""
    job = chosen_job(job_file, None, None, None)
    weights = graph_weights(prepare(job).flow, job.micro_batch_size)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(weights), indent=1).decode())
    else:
        out().print(graph_table(weights, operators=operators))


@app.command()
def train(
    job_file: JobFile,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    devices: DevicesOption = None,
    steps: StepsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this job.")] = False,
    run: Annotated[Path | None, typer.Option("--run", help="The run's folder; default RUN_DIR/NAME.")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan document, in place of planning.")] = None,
    scheme: Annotated[str | None, typer.Option("--scheme", help="Federated: ours, parrot, fa, sd, rw or sp.")] = None,
    executors: Annotated[int | None, typer.Option("--executors", min=1, help="Federated: where clients train.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Federated: in place of the job's.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan, train over one process per device, compare what was predicted with what was measured.

    A federated job (docs/federated.md) trains clients of a population on executors instead.
    """
    if is_federated(job_file):
        other = {"--fleet": fleet, "--planner": planner, "--devices": devices, "--steps": steps, "--plan": plan_file}
        federated.refuse_options(other)
        choices = federated.FederatedChoices(
            resume=resume, run=run, scheme=scheme, executors=executors, rounds=rounds, json=json
        )
        raise typer.Exit(federated.train(federated.read_job(job_file, choices), choices, out(), notes()))
    for option, given in (("--scheme", scheme), ("--executors", executors), ("--rounds", rounds)):
        if given is not None:
            raise UserError(f"{option}: {job_file} is no federated job: it has no table [federated]")
    job = chosen_job(job_file, fleet, planner, devices, steps)
    code = training.train(job, training.Choices(resume=resume, run=run, plan=plan_file, json=json), out(), notes())
    raise typer.Exit(code)
