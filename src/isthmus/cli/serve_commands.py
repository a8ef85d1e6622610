"""`isthmus serve`, `submit` and `probe`: commands of a fleet's coordinator that work with jobs and connections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import isthmus
from isthmus import api
from isthmus.cli.console import log, notes, out, show_run
from isthmus.cli.options import (
    FleetFileOption,
    JobFile,
    JobOptions,
    JsonOption,
    RunOptions,
    ServeOptions,
    StateOption,
    with_groups,
)
from isthmus.engines import ENGINES

if TYPE_CHECKING:
    from isthmus.api.probe import Probing

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
    handed = api.job_queue.submit_job(job, state, job_file)
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
