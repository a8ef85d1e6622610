"""The program of a job's run. Which one it is, is asked here."""

from __future__ import annotations

from isthmus.api.decoupled import Decoupled
from isthmus.api.pipeline import Pipeline
from isthmus.api.rounds import Rounds
from isthmus.federated.job import FederatedJob
from isthmus.job import Job


def program_of(job: Job | FederatedJob) -> Pipeline | Rounds:
    """Return the program of a job; each has the methods of `Pipeline`."""
    if isinstance(job, FederatedJob):
        return Rounds(job)
    return Decoupled(job) if job.sync.mode == "decoupled" else Pipeline(job)
