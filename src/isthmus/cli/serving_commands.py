"""`isthmus serve`, `probe` and `submit`: commands of a fleet's coordinator that work with jobs and connections."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.api.states import PORT
from isthmus.cli.lazy_import import LazyImport
from isthmus.cli.options import (
    FleetOption,
    JobFile,
    JsonOption,
    PlannerOption,
    StateOption,
    StepsOption,
    TimeoutOption,
    local_path,
)

if TYPE_CHECKING:
    from isthmus.api import federated_run, job_overrides, pipeline
    from isthmus.api import probe as probing
    from isthmus.api import serve as listening
    from isthmus.cli import serve_fleet, terminal
    from isthmus.federated import job as federated_job
else:
    federated_run = LazyImport("isthmus.api.federated_run")
    federated_job = LazyImport("isthmus.federated.job")
    listening = LazyImport("isthmus.api.serve")
    probing = LazyImport("isthmus.api.probe")
    job_overrides = LazyImport("isthmus.api.job_overrides")
    pipeline = LazyImport("isthmus.api.pipeline")
    serve_fleet = LazyImport("isthmus.cli.serve_fleet")
    terminal = LazyImport("isthmus.cli.terminal")

app = typer.Typer()

HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")]
AddressOption = Annotated[
    list[str] | None, typer.Option("--address", help="HOST[:PORT] by which devices reach it; may be repeated.")
]


@app.command()
def serve(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="Run this, then end.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = PORT,
    address: AddressOption = None,
    tickets: Annotated[int, typer.Option("--tickets", min=0, help="Print so many tickets at the start.")] = 1,
    timeout: TimeoutOption = "60 s",
    state: StateOption = None,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    steps: StepsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this job.")] = False,
    run: Annotated[Path | None, typer.Option("--run", help="The run's folder; default RUN_DIR/NAME.")] = None,
    json: JsonOption = False,
) -> None:
    """Coordinate devices that join over TLS; with a job, train it once all that its plan names are here.

    Without one it runs what `isthmus submit` hands in, one job after another, until Ctrl-C. A
    federated job trains at the sites that it names, which keep their data.
    """
    where = listening.Serving(
        host=host,
        port=port,
        addresses=tuple(address or ()),
        tickets=tickets,
        timeout=timeout,
        state=state,
        ticket=typer.echo,
    )
    if job_file is None:
        raise typer.Exit(serve_fleet.serve_submitted(where))
    if federated_job.is_federated(job_file):
        terminal.refuse_options({"--fleet": fleet, "--planner": planner, "--steps": steps})
        asked = federated_run.FederatedChoices(resume=resume, run=run)
        found = federated_run.read_job(job_file, asked)
        raise typer.Exit(serve_fleet.serve_federated(found, asked, where, json=json))
    job = job_overrides.Changes(fleet=fleet, planner=planner, steps=steps).of(job_overrides.job_of(job_file))
    choices = pipeline.Choices(resume=resume, run=run)
    raise typer.Exit(serve_fleet.serve_job(job, choices, where, json=json))


@app.command()
def submit(
    job_file: JobFile,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    steps: StepsOption = None,
    state: StateOption = None,
) -> None:
    """Hand a job to the coordinator that serves the fleet; prints its number.

    Paths in it count from here.
    """
    if federated_job.is_federated(job_file):
        terminal.refuse_options({"--fleet": fleet, "--planner": planner, "--steps": steps})
        serve_fleet.submit(state, federated_run.read_job(job_file, federated_run.FederatedChoices()))
    else:
        job = job_overrides.Changes(fleet=fleet, planner=planner, steps=steps).of(job_overrides.job_of(job_file))
        serve_fleet.submit(state, job)


@app.command()
def probe(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DEVICE...]", help="Names of devices that joined or will; none: this machine's."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", parser=local_path, metavar="FILE", help="Write the fleet here; default: stdout."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option("--job", metavar="JOB.toml", help="Measure speeds in the first layers of this job's model."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Of this machine: cpu, cuda:0, ...; default: all.")] = "",
    devices: Annotated[
        str, typer.Option("--devices", metavar="all|0,cpu", help="Of this machine: these, as `isthmus join` has them.")
    ] = "",
    memory: Annotated[
        str, typer.Option("--memory", help="What may be taken of each of this machine's devices: 4GiB; default: all.")
    ] = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = PORT,
    address: AddressOption = None,
    tickets: Annotated[int, typer.Option("--tickets", min=0, help="Print so many tickets at the start.")] = 0,
    timeout: TimeoutOption = "60 s",
    state: StateOption = None,
) -> None:
    """Measure this machine's devices, or those of a fleet and the links between them; write a fleet TOML."""
    where = listening.Serving(
        host=host,
        port=port,
        addresses=tuple(address or ()),
        tickets=tickets,
        timeout=timeout,
        state=state,
        ticket=typer.echo,
    )
    asked = probing.Probing(names=tuple(names or ()), job=job, device=device, devices=devices, memory=memory)
    serve_fleet.probe(asked, where, target)
