"""The job that a command line adds up to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.errors import UserError
from isthmus.federated.job import is_federated
from isthmus.federated.offer import is_site_file
from isthmus.job import Job, load_job
from isthmus.plans import Objective
from isthmus.units import parse_duration


def chosen_job(
    path: Path, fleet: str | None, planner: str | None, devices: int | None, steps: int | None = None,
    objective: Objective | None = None,
) -> Job:  # fmt: skip
    """The job with what the command line overrides. UserError for a file that is another command's."""
    if is_federated(path):
        what = "is a federated job, of which nothing is placed on a fleet: run `isthmus simulate`"
        raise UserError(f"{path}: {what}, `train`, or `serve` for one with sites")
    if is_site_file(path):
        raise UserError(f"{path}: is a site's file: `isthmus join --site {path}` takes part with it")
    job = load_job(path)
    if objective is not None:
        job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, objective=objective))
    if steps is not None:
        job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=steps))
    given = {"fleet": fleet, "planner": planner, "devices": devices}
    return msgspec.structs.replace(job, **{name: value for name, value in given.items() if value is not None})


def limited(job: Job, max_step: str | None, max_price: float | None) -> Job:
    """The job with other limits of table [plan]. UserError for a limit that is none."""
    if max_step is not None:
        parse_duration(max_step, "--max-step")
    if max_price is not None and not 0 < max_price < float("inf"):
        raise UserError(f"--max-price: got {max_price:g}, expected a finite number above 0")
    given = {"max_step": max_step, "max_price": max_price}
    limits = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, **limits))
