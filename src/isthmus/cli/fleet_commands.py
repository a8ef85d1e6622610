"""Commands that open a fleet's state folder and talk to nobody: they import neither torch nor what a job needs."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from isthmus import api
from isthmus.cli.console import log, out, print_json, show
from isthmus.cli.options import JsonOption, StateOption

app = typer.Typer()

REFRESH_S = 1.0

WantedArgument = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Its number or name; default: what runs, or came last.")
]


@app.command()
def jobs(state: StateOption = None, json: JsonOption = False) -> None:
    """List the jobs that were submitted: what runs, waits, and how the others ended."""
    found = api.jobs.submitted_jobs(state)
    rows = [{k: v for k, v in msgspec.to_builtins(job).items() if k != "document"} for job in found]
    show(rows, lambda: api.status.jobs_table(found), json=json)


@app.command()
def status(
    state: StateOption = None,
    once: Annotated[bool, typer.Option("--once", help="Do not stay and follow.")] = False,
    json: JsonOption = False,
) -> None:
    """Show who is here, what runs and how far it is. On a terminal it stays and follows, until Ctrl-C."""
    shown = out()
    with api.jobs.opened(state) as (queue, folder):
        if json:
            print_json(api.status.status_of(queue, folder))
            return
        view = api.status.status_view
        if once or not shown.is_terminal:
            shown.print(view(api.status.status_of(queue, folder), queue.jobs()))
            return
        with api.consoles.live(shown) as live:
            while True:
                live.update(view(api.status.status_of(queue, folder), queue.jobs()), refresh=True)
                time.sleep(REFRESH_S)


@app.command()
def logs(
    job: WantedArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="From the beginning.")] = False,
    state: StateOption = None,
) -> None:
    """Print what a submitted job says."""
    tail = None if everything else api.jobs.TAIL_LINES
    for text in api.jobs.job_lines(job, state, follow=follow, tail=tail):
        typer.echo(text, nl=False)


@app.command()
def stop(job: WantedArgument = None, state: StateOption = None) -> None:
    """End a submitted job: what it leased is finished, a checkpoint saved. `resume` goes on from there."""
    found = api.jobs.stop_job(job, state)
    how = "saves and ends" if found.state == "running" else "is taken out of the queue"
    log(f"job {found.number} ({found.name}) {how}; `isthmus resume {found.number}` goes on")


@app.command()
def resume(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Its number or name; default: the one that is stopping, or what was stopped or failed last.",
        ),
    ] = None,
    state: StateOption = None,
) -> None:
    """Queue a job once more that was stopped or failed; it goes on from its newest checkpoint."""
    found = api.jobs.resume_job(job, state)
    when = ", once it has stopped" if found.state == "running" else ""
    log(f"job {found.number} ({found.name}) is queued{when}: it goes on from where it was")


@app.command()
def ticket(
    state: StateOption = None,
    count: Annotated[int, typer.Option("--count", min=1, help="So many.")] = 1,
) -> None:
    """Print a ticket for one more device. It is good once and for 24 hours."""
    for text in api.jobs.make_tickets(count, state):
        typer.echo(text)


@app.command()
def devices(
    revoke: Annotated[str | None, typer.Option("--revoke", help="Shut this device out: its name or id.")] = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """List the devices that joined; or shut one out, at once."""
    if revoke is not None:
        member = api.jobs.revoke_device(revoke, state)
        log(f"revoked {member.name} ({member.id})")
    members = api.jobs.fleet_members(state)
    show(members, lambda: api.status.members_table(members), json=json)


@app.command()
def drain(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Its name.")],
    state: StateOption = None,
) -> None:
    """Have a device leave the run that it works for, without loss: others take over its part first."""
    api.jobs.drain_device(device, state)
    log(f"{device} leaves its run as soon as its part is with others")
