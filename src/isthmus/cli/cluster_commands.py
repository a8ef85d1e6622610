"""`isthmus up`: a job on the nodes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import isthmus
from isthmus import api
from isthmus.cli.console import show_run
from isthmus.cli.options import (
    JobFile,
    JobOptions,
    JsonOption,
    ResumeOption,
    RunOption,
    TimeoutOption,
    command_to_go_on,
    with_groups,
)
from isthmus.engines import CLUSTER_ENGINES
from isthmus.overrides import read_overrides

if TYPE_CHECKING:
    from isthmus.api.up_choices import UpChoices

app = typer.Typer()

_ENGINES = f"{', '.join(CLUSTER_ENGINES)}, or one of another package"


@dataclass(frozen=True)
class UpOptions:
    """Which agents an engine starts, and how they reach the coordinator."""

    engine: Annotated[str, typer.Option("--on", metavar="ENGINE", help=f"What starts agents: {_ENGINES}.")]
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
