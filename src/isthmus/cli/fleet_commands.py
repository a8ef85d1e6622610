"""Commands of a fleet of machines: its coordinator's, its devices', and those that hand it jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli import coordinating, federated, jobs, joining, serving, status, training
from isthmus.cli.options import (
    FleetOption,
    JobFile,
    JsonOption,
    PatienceOption,
    PlannerOption,
    StepsOption,
    chosen_job,
    notes,
    out,
)
from isthmus.errors import UserError
from isthmus.federated.job import is_federated
from isthmus.runtime.processes.launcher import Place

app = typer.Typer()

HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")]
AddressOption = Annotated[
    list[str] | None, typer.Option("--address", help="HOST[:PORT] by which devices reach it; may be repeated.")
]
WantedArgument = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Its number or name; default: what runs, or came last.")
]


@app.command()
def serve(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="Run this, then end.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = serving.PORT,
    address: AddressOption = None,
    tickets: Annotated[int, typer.Option("--tickets", min=0, help="Print so many tickets at the start.")] = 1,
    patience: PatienceOption = "60 s",
    state: serving.StateOption = None,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    steps: StepsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this job.")] = False,
    run: Annotated[Path | None, typer.Option("--run", help="The run's folder; default RUN_DIR/NAME.")] = None,
    json: JsonOption = False,
) -> None:
    """Coordinate devices that join over TLS; with a job, train it on them once all that the plan names are here.

    Without one it runs what `isthmus submit` hands in, one job after another, until Ctrl-C. A job with a table
    [federated] trains at the sites that it names, which keep their data.
    """
    where = serving.Serving(host=host, port=port, addresses=tuple(address or ()), tickets=tickets, patience=patience)
    if job_file is None:
        raise typer.Exit(coordinating.serve_submitted(state, where, notes()))
    if is_federated(job_file):
        federated.refuse_options({"--fleet": fleet, "--planner": planner, "--steps": steps})
        chosen = federated.FederatedChoices(resume=resume, run=run, json=json)
        found = federated.read_job(job_file, chosen)
        raise typer.Exit(coordinating.serve_federated(found, chosen, state, where, out(), notes()))
    job = chosen_job(job_file, fleet, planner, None, steps)
    choices = training.Choices(resume=resume, run=run, json=json)
    raise typer.Exit(coordinating.serve_job(job, choices, state, where, out(), notes()))


@app.command()
def submit(
    job_file: JobFile,
    fleet: FleetOption = None,
    planner: PlannerOption = None,
    steps: StepsOption = None,
    state: serving.StateOption = None,
) -> None:
    """Hand a job to the coordinator that serves the fleet; prints its number. Paths in it count from here."""
    if is_federated(job_file):
        federated.refuse_options({"--fleet": fleet, "--planner": planner, "--steps": steps})
        jobs.submit(state, federated.read_job(job_file, federated.FederatedChoices()), notes())
    else:
        jobs.submit(state, chosen_job(job_file, fleet, planner, None, steps), notes())


@app.command(name="jobs")
def jobs_command(state: serving.StateOption = None, json: JsonOption = False) -> None:
    """List the jobs that were submitted: what runs, waits, and how the others ended."""
    jobs.jobs(state, out(), json=json)


@app.command(name="status")
def status_command(
    state: serving.StateOption = None,
    once: Annotated[bool, typer.Option("--once", help="Do not stay and follow.")] = False,
    json: JsonOption = False,
) -> None:
    """Who is here, what runs and how far it is. On a terminal it stays and follows, until Ctrl-C."""
    status.status(state, out(), json=json, once=once)


@app.command()
def logs(
    job: WantedArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="From the beginning.")] = False,
    state: serving.StateOption = None,
) -> None:
    """Print what a submitted job says."""
    jobs.logs(state, job, follow=follow, everything=everything)


@app.command()
def stop(job: WantedArgument = None, state: serving.StateOption = None) -> None:
    """End a submitted job: what it leased is finished, a checkpoint saved. `resume` goes on from there."""
    jobs.stop(state, job, notes())


@app.command()
def resume(job: WantedArgument = None, state: serving.StateOption = None) -> None:
    """Queue a job once more that was stopped or failed; it goes on from its newest checkpoint."""
    jobs.resume(state, job, notes())


@app.command()
def probe(
    names: Annotated[list[str], typer.Argument(metavar="DEVICE...", help="Names of devices that joined or will.")],
    target: Annotated[Path | None, typer.Option("--out", help="Write the fleet here; default: stdout.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = serving.PORT,
    address: AddressOption = None,
    tickets: Annotated[int, typer.Option("--tickets", min=0, help="Print so many tickets at the start.")] = 0,
    patience: PatienceOption = "60 s",
    state: serving.StateOption = None,
) -> None:
    """Measure devices and the links between them; print the matrix and write a fleet TOML."""
    where = serving.Serving(host=host, port=port, addresses=tuple(address or ()), tickets=tickets, patience=patience)
    serving.probe(state, where, names, target, out())


@app.command()
def ticket(
    state: serving.StateOption = None,
    count: Annotated[int, typer.Option("--count", min=1, help="So many.")] = 1,
) -> None:
    """Print a ticket for one more device. It is good once and for 24 hours."""
    serving.ticket(state, count)


@app.command()
def devices(
    revoke: Annotated[str | None, typer.Option("--revoke", help="Shut this device out: its name or id.")] = None,
    state: serving.StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the devices that joined; or shut one out, at once."""
    serving.devices(state, revoke, out(), json=json)


@app.command()
def drain(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Its name.")],
    state: serving.StateOption = None,
) -> None:
    """Have a device leave the run that it works for, without loss: others take over its part first."""
    serving.drain(state, device)


@app.command()
def join(
    name: Annotated[str | None, typer.Option("--name", help="As the fleet calls it; default: the host's name.")] = None,
    ticket_file: Annotated[
        Path | None, typer.Option("--ticket-file", help="A 0600 file; else it is asked for, or read from stdin.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on for other devices; default: towards the coordinator.")
    ] = "",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port for it; 0: any that is free.")] = 0,
    address: Annotated[str, typer.Option("--address", help="How others reach it, where that is not --host.")] = "",
    relayed: Annotated[
        bool, typer.Option("--relayed", help="Listen for nobody: other devices come by way of the coordinator.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with this device's data: jobs name files in it, no others.")
    ] = None,
    site: Annotated[
        Path | None, typer.Option("--site", help="Federated: a TOML with this site's data and what may run on them.")
    ] = None,
    patience: PatienceOption = "60 s",
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder of the key; default ~/.local/state/isthmus/device.")
    ] = None,
) -> None:
    """Join a fleet and stay, ready to work. The first time it needs a ticket."""
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: not a folder")
    place = Place(host="127.0.0.1" if relayed else host, port=port, address=address, relayed=relayed, data=data)
    asked = joining.Joining(
        state=state, ticket_file=ticket_file, name=name, patience=patience, place=place, site=site
    )  # fmt: skip
    raise typer.Exit(joining.join(asked))


@app.command()
def doctor(
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder of the key; default ~/.local/state/isthmus/device.")
    ] = None,
    ticket_file: Annotated[
        Path | None, typer.Option("--ticket-file", help="Look with this ticket, before joining. It is not used up.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say why a device does not get to its coordinator: the hop that is broken, and what to do."""
    raise typer.Exit(joining.doctor(state, ticket_file, out(), json=json))
