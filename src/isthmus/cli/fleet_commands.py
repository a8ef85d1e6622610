"""Commands that open a fleet's state folder and talk to nobody: they import neither torch nor what a job needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.lazy_import import LazyImport
from isthmus.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    from isthmus.cli import fleets
else:
    fleets = LazyImport("isthmus.cli.fleets")

app = typer.Typer()

WantedArgument = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Its number or name; default: what runs, or came last.")
]


@app.command(name="jobs")
def jobs_command(state: StateOption = None, json: JsonOption = False) -> None:
    """List the jobs that were submitted: what runs, waits, and how the others ended."""
    fleets.show_jobs(state, json=json)


@app.command(name="status")
def status_command(
    state: StateOption = None,
    once: Annotated[bool, typer.Option("--once", help="Do not stay and follow.")] = False,
    json: JsonOption = False,
) -> None:
    """Who is here, what runs and how far it is. On a terminal it stays and follows, until Ctrl-C."""
    fleets.show_status(state, json=json, once=once)


@app.command()
def logs(
    job: WantedArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="From the beginning.")] = False,
    state: StateOption = None,
) -> None:
    """Print what a submitted job says."""
    fleets.show_logs(state, job, follow=follow, everything=everything)


@app.command()
def stop(job: WantedArgument = None, state: StateOption = None) -> None:
    """End a submitted job: what it leased is finished, a checkpoint saved. `resume` goes on from there."""
    fleets.stop(state, job)


@app.command()
def resume(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Its number or name; default: what was stopped or failed last.")
    ] = None,
    state: StateOption = None,
) -> None:
    """Queue a job once more that was stopped or failed; it goes on from its newest checkpoint."""
    fleets.resume(state, job)


@app.command()
def ticket(
    state: StateOption = None,
    count: Annotated[int, typer.Option("--count", min=1, help="So many.")] = 1,
) -> None:
    """Print a ticket for one more device. It is good once and for 24 hours."""
    fleets.show_tickets(state, count)


@app.command()
def devices(
    revoke: Annotated[str | None, typer.Option("--revoke", help="Shut this device out: its name or id.")] = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the devices that joined; or shut one out, at once."""
    fleets.show_devices(state, revoke, json=json)


@app.command()
def drain(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Its name.")],
    state: StateOption = None,
) -> None:
    """Have a device leave the run that it works for, without loss: others take over its part first."""
    fleets.drain(state, device)
