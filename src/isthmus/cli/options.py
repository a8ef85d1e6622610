"""Options that several commands have, and the job that they add up to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from isthmus.job import Job, load_job
from isthmus.plan import Objective

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job: model, data, training.")]
FleetOption = Annotated[str | None, typer.Option("--fleet", help="A built-in topology or a fleet TOML.")]
PlannerOption = Annotated[str | None, typer.Option("--planner", help="See `isthmus planners`.")]
ObjectiveOption = Annotated[
    Literal["time", "cost"] | None, typer.Option("--objective", help="What to minimise: a step's time, or its price.")
]
DevicesOption = Annotated[int | None, typer.Option("--devices", min=1, help="Thin the fleet to so many devices.")]
PatienceOption = Annotated[str, typer.Option("--patience", help="Silence after which another party is lost.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, in place of the job's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def chosen_job(
    path: Path, fleet: str | None, planner: str | None, devices: int | None, steps: int | None = None,
    objective: Objective | None = None,
) -> Job:  # fmt: skip
    """The job with what the command line overrides."""
    job = load_job(path)
    if objective is not None:
        job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, objective=objective))
    if steps is not None:
        job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=steps))
    given = {"fleet": fleet, "planner": planner, "devices": devices}
    return msgspec.structs.replace(job, **{name: value for name, value in given.items() if value is not None})


def out() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)


def notes() -> Console:
    return Console(stderr=True)
