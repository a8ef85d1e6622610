"""What a job's data are like, in a file for machines that do not have them."""

from __future__ import annotations

from isthmus.data.description import description_file
from isthmus.job import Job, described_here


def description_of(job: Job) -> bytes:
    """The text of a description file. Opens the data. UserError."""
    return description_file(job.data, described_here(job))
