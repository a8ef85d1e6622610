"""`isthmus submit`: a job for the coordinator that serves the fleet."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console

from isthmus.cli.jobs import opened
from isthmus.data.allowed import refuse_paths
from isthmus.errors import unknown_name
from isthmus.federated.job import FederatedJob, check_deployment
from isthmus.job import Job, fleet_of
from isthmus.models import model_names
from isthmus.runtime.service.bulletin import posted


def submit(state: Path | None, job: Job | FederatedJob, out: Console) -> None:
    """Hand it in. UserError for what could not be run anyway."""
    if isinstance(job, FederatedJob):
        check_deployment(job)
    else:
        fleet_of(job)
        if ":" not in job.model.name and job.model.name not in model_names():
            raise unknown_name("model", job.model.name, model_names())
        refuse_paths(job.data)
    with opened(state) as (queue, folder):
        kind = "federated" if isinstance(job, FederatedJob) else "pipeline"
        number = queue.submit(job.name, kind, msgspec.json.encode(job), Path.cwd())
        typer.echo(number)
        waiting = [j for j in queue.jobs() if j.state in ("queued", "running") and j.number != number]
        place = f"{len(waiting)} before it" if waiting else "nothing before it"
        out.print(f"job {number} ({job.name}) is queued, {place}", highlight=False)
        if (news := posted(folder)) is None or not news.fresh:
            out.print("no coordinator runs: `isthmus serve` without a job does what is queued", highlight=False)
