"""Options that several commands have. Nothing heavy is imported here: all commands read this."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job: model, data, training.")]
FleetOption = Annotated[str | None, typer.Option("--fleet", help="A built-in topology or a fleet TOML.")]
PlannerOption = Annotated[str | None, typer.Option("--planner", help="See `isthmus planners`.")]
ObjectiveOption = Annotated[
    Literal["time", "cost"] | None, typer.Option("--objective", help="What to minimise: a step's time, or its price.")
]
DevicesOption = Annotated[int | None, typer.Option("--devices", min=1, help="Thin the fleet to so many devices.")]
PatienceOption = Annotated[str, typer.Option("--patience", help="Silence after which another party is lost.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, in place of the job's.")]
StateOption = Annotated[
    Path | None, typer.Option("--state", help="Folder with the fleet's keys; default ~/.local/state/isthmus/fleet.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


# Names and reasons come from files and from other parties: "[data]" in one of them is what it says, not a style.


def out() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, markup=False)


def notes() -> Console:
    return Console(stderr=True, markup=False)


def state_folder(kind: str) -> Path:
    """By convention of the XDG base directories."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "isthmus" / kind
