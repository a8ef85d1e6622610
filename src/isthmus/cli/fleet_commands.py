"""Commands on the machine of a fleet's coordinator: `isthmus serve`, `submit`, `probe` and `up` work with jobs and
connections; all others open the state folder and talk to nobody: they import neither torch nor what a job needs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

import isthmus
from isthmus import api
from isthmus.cli.console import log, notes, out, print_json, show, show_run
from isthmus.cli.options import (
    FleetFileOption,
    JobFile,
    JobOptions,
    JsonOption,
    ResumeOption,
    RunOption,
    RunOptions,
    ServeOptions,
    StateOption,
    TimeoutOption,
    command_to_go_on,
    with_groups,
)
from isthmus.engines import CLUSTER_ENGINES, ENGINES
from isthmus.overrides import read_overrides

if TYPE_CHECKING:
    from isthmus.api.probe import Probing
    from isthmus.api.serving_fleet import UpChoices


app = typer.Typer()

_ENGINES = " or ".join(ENGINES)

TicketsOption = Annotated[int, typer.Option("--tickets", min=0, help="Print so many tickets at the start.")]


@app.command()
@with_groups
def serve(
    where: ServeOptions,
    asked: JobOptions,
    how: RunOptions,
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="Run this, then end.")] = None,
    tickets: TicketsOption = 1,
    json: JsonOption = False,
) -> None:
    """Coordinate devices that join over TLS; with a job, train it once all that its plan names are here.

    Without one it runs what `isthmus submit` hands in, one job after another, until Ctrl-C. A
    federated job trains at the sites that it names, which keep their data; or shares out its
    simulated clients among the devices.
    """
    serving, stop = where.serving(tickets), isthmus.Stop()
    if job_file is None:
        asked.refuse_without_job({"--resume": how.resume, "--run": how.run, "--json": json})
        terminal = api.terminal.Terminal(out(), notes())
        api.serve.serve_submitted(serving, terminal, api.terminal.logged, dashboard=how.dashboard)
        raise typer.Exit(130)  # after Ctrl-C
    job = asked.any_job(job_file)
    choices = how.choices()
    raise typer.Exit(show_run(lambda terminal: api.serve.serve_job(job, choices, serving, terminal, stop), json=json))


@app.command()
@with_groups
def submit(job_file: JobFile, asked: JobOptions, state: StateOption = None) -> None:
    """Hand a job to the coordinator that serves the fleet; prints its number.

    Paths in it count from the job file; its runs are written to this folder.
    """
    job = asked.any_job(job_file)
    handed = api.serve.submit_job(job, state, job_file)
    typer.echo(handed.number)
    place = f"{handed.before} before it" if handed.before else "nothing before it"
    log(f"job {handed.number} ({job.name}) is queued, {place}")
    if handed.absent:
        more = f" and {len(handed.absent) - 5} more" if len(handed.absent) > 5 else ""
        log(f"not connected now: {', '.join(handed.absent[:5])}{more}; the job waits for those that its plan needs")
    if not handed.served:
        log("no coordinator runs: `isthmus serve` without a job does what is queued")


@dataclass(frozen=True)
class ProbeOptions:
    """The devices to measure."""

    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DEVICE...]", help="Names of devices that joined or will; none: this machine's."),
    ] = None
    job: Annotated[
        Path | None,
        typer.Option("--job", metavar="JOB.toml", help="Measure speeds in the first layers of this job's model."),
    ] = None
    device: Annotated[list[str] | None, typer.Option("--device", help="A device here: cuda:0; default: all.")] = None
    devices: Annotated[
        str,
        typer.Option("--devices", metavar="all|0,cpu", help="These devices here, as `isthmus join` has them."),
    ] = ""
    memory: Annotated[
        str, typer.Option("--memory", help="What may be taken of each device here: 4GiB; default: all that is free.")
    ] = ""
    engine: Annotated[str, typer.Option("--engine", help=f"What computes on this machine's: {_ENGINES}.")] = "torch"

    def probing(self) -> Probing:
        given: dict[str, Any] = vars(self) | {
            "names": tuple(self.names or ()),
            "device": api.join.single_device(self.device, ""),
        }
        return api.probe.Probing(**given)


@app.command()
@with_groups
def probe(where: ServeOptions, asked: ProbeOptions, target: FleetFileOption = None, tickets: TicketsOption = 0) -> None:
    """Measure this machine's devices, or those of a fleet and the links between them; write a fleet TOML."""
    api.output.check_file("--out", target)
    terminal = api.terminal.Terminal(out(), notes())
    fleet = api.probe.probe_devices(asked.probing(), where.serving(tickets), terminal.note)
    for one in fleet.devices:
        terminal.note(f"{one.name}: {api.output.device_text(one)}")
    if target is None:
        typer.echo(api.output.dump_fleet(fleet))
        notes().print(api.output.matrix_table(fleet))
        return
    api.output.write_file("--out", target, lambda path: path.write_text(api.output.dump_fleet(fleet), encoding="utf-8"))
    out().print(api.output.matrix_table(fleet))
    terminal.note(f"wrote {target}: --fleet {target} plans with it")


_LAUNCHERS = f"{', '.join(CLUSTER_ENGINES)}, or one of another package"


@dataclass(frozen=True)
class UpOptions:
    """Which agents an engine starts, and how they reach the coordinator."""

    engine: Annotated[str, typer.Option("--on", metavar="ENGINE", help=f"What starts agents: {_LAUNCHERS}.")]
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Default: those of the fleet file, or all that the engine has.")
    ] = None
    devices_per_node: Annotated[
        str,
        typer.Option(
            "--devices-per-node",
            metavar="auto|N|island",
            help="auto: each accelerator is a device; island: all of a node are one, under torchrun.",
        ),
    ] = "auto"
    options: Annotated[
        list[str] | None, typer.Option("--on-option", metavar="KEY=VALUE", help="An option of the backend; repeatable.")
    ] = None
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; default: towards the engine; local: loopback.")
    ] = ""
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 0
    addresses: Annotated[
        list[str] | None, typer.Option("--address", help="HOST[:PORT] by which nodes reach it; may be repeated.")
    ] = None
    timeout: TimeoutOption = "60 s"
    data: Annotated[Path | None, typer.Option("--data", help="Folder with the data, on every node.")] = None
    memory: Annotated[str, typer.Option("--memory", help="What jobs may take of each device's: 4GiB.")] = ""
    measure: Annotated[
        bool | None,
        typer.Option("--measure/--no-measure", help="Measure devices; default: unless the job has a fleet file."),
    ] = None
    resume: ResumeOption = False
    run: RunOption = None
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what agents print.")] = False

    def choices(self) -> UpChoices:
        options = read_overrides(self.options or (), "--on-option", "hosts=nodes.txt")
        given: dict[str, Any] = vars(self) | {"options": options, "addresses": tuple(self.addresses or ())}
        return api.up.UpChoices(**given, again=command_to_go_on())


@app.command()
@with_groups
def up(
    job_file: JobFile,
    asked: JobOptions,
    on: UpOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the engine would be handed, without tickets; start nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a job on a cluster: start a coordinator here and an agent on each node, and end them with the run."""
    how = on.choices()
    if dry_run:
        typer.echo(api.up.rendered(asked.any_job(job_file, measure=how.measure), how), nl=False)
        return
    if how.engine == "local":
        api.up.fork_agents_early()
    job, stop = asked.any_job(job_file, measure=how.measure), isthmus.Stop()
    raise typer.Exit(show_run(lambda terminal: api.up.run_on_engine(job, how, terminal, stop), json=json))


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
