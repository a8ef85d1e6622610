"""`isthmus plan`, `simulate`, `graph`, `describe` and `train`: of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.later import Later
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

if TYPE_CHECKING:
    from isthmus.cli import (
        chosen,
        comparing,
        describing,
        explaining,
        federated,
        federated_simulating,
        simulating,
        training,
        verifying,
    )
    from isthmus.federated import job as federated_job
else:
    chosen = Later("isthmus.cli.chosen")
    comparing = Later("isthmus.cli.comparing")
    describing = Later("isthmus.cli.describing")
    explaining = Later("isthmus.cli.explaining")
    federated = Later("isthmus.cli.federated")
    federated_job = Later("isthmus.federated.job")
    federated_simulating = Later("isthmus.cli.federated_simulating")
    simulating = Later("isthmus.cli.simulating")
    training = Later("isthmus.cli.training")
    verifying = Later("isthmus.cli.verifying")

app = typer.Typer()


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
    json: JsonOption = False,
) -> None:
    """Plan where each part of the model runs; or compare planners, or check a plan.

    With --json: the plan document.
    """
    job = chosen.chosen_job(job_file, fleet, planner, devices, objective=objective)
    job = chosen.limited(job, max_step, max_price)
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
    if federated_job.is_federated(job_file):
        other = {"--fleet": fleet, "--planner": planner, "--devices": devices, "--objective": objective}
        federated.refuse_options({**other, "--steps": steps, "--plan": plan_file, "--trace": trace_file})
        fed_job = federated.read_job(job_file, federated.FederatedChoices())
        raise typer.Exit(federated_simulating.simulate(fed_job, out(), json=json))
    job = chosen.chosen_job(job_file, fleet, planner, devices, steps or simulating.STEPS, objective)
    simulating.simulate(job, plan_file, trace_file, out(), json=json)


@app.command()
def graph(
    job_file: JobFile,
    operators: Annotated[bool, typer.Option("--operators", help="Every operator, not only layers.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what each layer of a job's model computes and keeps. With --json: every operator too."""
    job = chosen.chosen_job(job_file, None, None, None)
    explaining.show_graph(job, out(), operators=operators, json=json)


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
    describing.describe_data(chosen.chosen_job(job_file, None, None, None), target)


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
    if federated_job.is_federated(job_file):
        other = {"--fleet": fleet, "--planner": planner, "--devices": devices, "--steps": steps, "--plan": plan_file}
        federated.refuse_options(other)
        choices = federated.FederatedChoices(
            resume=resume, run=run, scheme=scheme, executors=executors, rounds=rounds, json=json
        )
        raise typer.Exit(federated.train(federated.read_job(job_file, choices), choices, out(), notes()))
    for option, given in (("--scheme", scheme), ("--executors", executors), ("--rounds", rounds)):
        if given is not None:
            raise UserError(f"{option}: {job_file} is no federated job: it has no table [federated]")
    job = chosen.chosen_job(job_file, fleet, planner, devices, steps)
    code = training.train(job, training.Choices(resume=resume, run=run, plan=plan_file, json=json), out(), notes())
    raise typer.Exit(code)
