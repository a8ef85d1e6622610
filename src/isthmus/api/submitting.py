"""Jobs for the coordinator that serves the fleet."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.api.jobs import opened
from isthmus.data.allowed import refuse_paths
from isthmus.errors import unknown_name
from isthmus.federated.job import FederatedJob, check_deployment
from isthmus.job import Job, fleet_of
from isthmus.models import model_names
from isthmus.runtime.service.status_file import read_status


class Handed(NamedTuple):
    number: int
    before: int
    """Jobs that wait or run."""
    served: bool
    """Whether a coordinator is there."""


def submit_job(job: Job | FederatedJob, state: Path | None = None) -> Handed:
    """Hand it in. Paths in it count from the current folder. UserError for what could not be run anyway."""
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
        waiting = [j for j in queue.jobs() if j.state in ("queued", "running") and j.number != number]
        current_status = read_status(folder)
        return Handed(number, len(waiting), served=current_status is not None and current_status.fresh)
