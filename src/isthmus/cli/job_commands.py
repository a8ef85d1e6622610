"""`isthmus plan`, `simulate`, `graph`, `describe` and `train`: of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.lazy_import import LazyImport
from isthmus.cli.options import (
    DevicesOption,
    FleetOption,
    JobFile,
    JsonOption,
    ObjectiveOption,
    PlannerOption,
    SetOption,
    StepsOption,
    local_path,
)
from isthmus.errors import UserError
from isthmus.overrides import read_overrides

if TYPE_CHECKING:
    from isthmus.api import federated_run, job_overrides, pipeline
    from isthmus.cli import plan_output, terminal
    from isthmus.federated import job as federated_job
else:
    federated_run = LazyImport("isthmus.api.federated_run")
    federated_job = LazyImport("isthmus.federated.job")
    job_overrides = LazyImport("isthmus.api.job_overrides")
    pipeline = LazyImport("isthmus.api.pipeline")
    plan_output = LazyImport("isthmus.cli.plan_output")
    terminal = LazyImport("isthmus.cli.terminal")

app = typer.Typer()

STEPS = 4
"""Of a simulation, where nothing else is said."""


@app.command()
def plan(
    job_file: JobFile,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    devices: DevicesOption = None,
    objective: ObjectiveOption = None,
    max_step: Annotated[
        str | None, typer.Option("--max-step", help="With --objective cost: no step longer than that, as '300 ms'.")
    ] = None,
    max_price: Annotated[
        float | None, typer.Option("--max-price", help="With --objective time: what 1,000 steps may cost.")
    ] = None,
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
    overrides: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Plan where each part of the model runs; or compare planners, or check a plan.

    With --json: the plan document.
    """
    changes = job_overrides.Changes(
        fleet=fleet, planner=planner, devices=devices, objective=objective, max_step=max_step, max_price=max_price
    )
    job = changes.of(job_overrides.job_of(job_file, read_overrides(overrides or ())))
    alone = [name for name, given in (("--compare", compare), ("--verify", verify)) if given is not None]
    extra = [name for name, given in (("--explain", explain), ("--picture", picture is not None)) if given]
    if alone and len(alone) + len(extra) > 1:
        raise UserError(f"plan: got {' and '.join([*alone, *extra])}, expected {alone[0]} without the others")
    if bound_unchecked and verify is None:
        raise UserError("plan: --bound-unchecked is for --verify")
    if compare is not None:
        raise typer.Exit(plan_output.show_compared(job, compare, json=json))
    if verify is not None:
        raise typer.Exit(plan_output.show_verified(job, verify, bound_unchecked=bound_unchecked, json=json))
    plan_output.show_plan(job, words=explain, picture=picture, json=json)


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
    overrides: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Run the plan on a virtual clock: the same machines as a real run, with modelled durations.

    Of a job with a table [federated]: its rounds, with clients' times as measured on this machine.
    """
    if federated_job.is_federated(job_file):
        other = {"--fleet": fleet, "--planner": planner, "--devices": devices, "--objective": objective}
        terminal.refuse_options({**other, "--steps": steps, "--plan": plan_file, "--trace": trace_file})
        fed_job = federated_run.read_job(job_file, federated_run.FederatedChoices(), read_overrides(overrides or ()))
        raise typer.Exit(plan_output.show_simulated_rounds(fed_job, json=json))
    changes = job_overrides.Changes(
        fleet=fleet, planner=planner, devices=devices, steps=steps or STEPS, objective=objective
    )
    job = changes.of(job_overrides.job_of(job_file, read_overrides(overrides or ())))
    plan_output.show_simulation(job, plan_file, trace_file, json=json)


@app.command()
def graph(
    job_file: JobFile,
    operators: Annotated[bool, typer.Option("--operators", help="Every operator, not only layers.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what each layer of a job's model computes and keeps. With --json: every operator too."""
    plan_output.show_graph(job_overrides.job_of(job_file), operators=operators, json=json)


@app.command(name="describe-data")
def describe_data(
    job_file: JobFile,
    target: Annotated[
        Path | None,
        typer.Option("--out", parser=local_path, metavar="FILE", help="Write the description here; default: stdout."),
    ] = None,
) -> None:
    """Say what a job's data are like, without showing them: for a machine that plans and has none.

    There `[data] description` names the file.
    """
    plan_output.write_description(job_overrides.job_of(job_file), target)


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
    overrides: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and plan; train nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Plan, train over one process per device, compare what was predicted with what was measured.

    A federated job (docs/federated.md) trains clients of a population on executors instead.
    """
    if federated_job.is_federated(job_file):
        other = {"--fleet": fleet, "--planner": planner, "--devices": devices, "--steps": steps, "--plan": plan_file}
        terminal.refuse_options(other)
        choices = federated_run.FederatedChoices(
            resume=resume, run=run, scheme=scheme, executors=executors, rounds=rounds
        )
        fed_job = federated_run.read_job(job_file, choices, read_overrides(overrides or ()))
        if dry_run:
            raise typer.Exit(plan_output.show_simulated_rounds(fed_job, json=json))
        raise typer.Exit(terminal.show_rounds(fed_job, choices, json=json))
    for option, given in (("--scheme", scheme), ("--executors", executors), ("--rounds", rounds)):
        if given is not None:
            raise UserError(f"{option}: {job_file} is no federated job: it has no table [federated]")
    changes = job_overrides.Changes(fleet=fleet, planner=planner, devices=devices, steps=steps)
    job = changes.of(job_overrides.job_of(job_file, read_overrides(overrides or ())))
    if dry_run:
        plan_output.show_plan(job, words=False, picture=None, json=json)
        return
    choices = pipeline.Choices(resume=resume, run=run, plan=plan_file)
    raise typer.Exit(terminal.show_training(job, choices, json=json))
