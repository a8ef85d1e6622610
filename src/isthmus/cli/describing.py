"""`isthmus describe-data JOB`: what its data are like, in a file for machines that do not have them."""

from __future__ import annotations

from pathlib import Path

import typer

from isthmus.cli.options import notes
from isthmus.data.description import description_file
from isthmus.errors import UserError
from isthmus.job import Job, described_here


def describe_data(job: Job, target: Path | None) -> None:
    """To the file, or to stdout."""
    found = described_here(job)
    text = description_file(job.data, found)
    if target is None:
        typer.echo(text.decode(), nl=False)
        return
    try:
        target.write_bytes(text)
    except OSError as e:
        raise UserError(f"--out {target}: cannot be written: {e.strerror or e}") from None
    notes().print(f'wrote {target}: [data] description = "{target}" plans with it', highlight=False, soft_wrap=True)
