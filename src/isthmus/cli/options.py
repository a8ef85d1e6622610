"""Options that several commands have. Nothing heavy is imported here: all commands read this."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from isthmus.documents import check_is_local


def local_path(text: str) -> Path:
    """Of an option that is written to; UserError for the address of a remote store."""
    check_is_local("path", text)
    return Path(text)


JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job: model, data, training.")]
FleetOption = Annotated[str | None, typer.Option("--fleet", help="A built-in topology or a fleet TOML.")]
PlannerOption = Annotated[str | None, typer.Option("--planner", help="See `isthmus planners`.")]
ObjectiveOption = Annotated[
    Literal["time", "cost"] | None, typer.Option("--objective", help="What to minimise: a step's time, or its price.")
]
DevicesOption = Annotated[int | None, typer.Option("--devices", min=1, help="Thin the fleet to so many devices.")]
TimeoutOption = Annotated[str, typer.Option("--timeout", help="Silence after which another party is lost.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, in place of the job's.")]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        parser=local_path,
        metavar="DIR",
        help="Folder with the fleet's keys; default ~/.local/state/isthmus/fleet.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="In place of what the job says: training.steps=50; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


# Names and reasons come from files and from other parties: "[data]" in one of them is what it says, not a style.


def out() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, markup=False)


class Notes(Console):
    """Standard error. Where nobody reads it any more, what is under way goes on: rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def notes() -> Console:
    return Notes(stderr=True, markup=False)


def print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())
