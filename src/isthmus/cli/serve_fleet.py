"""What commands of a coordinator print."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import typer
from rich.console import Console

from isthmus.api import serve
from isthmus.api.federated_run import FederatedChoices
from isthmus.api.job_queue import submit_job
from isthmus.api.pipeline import Choices
from isthmus.api.probe import Probing, probe_devices
from isthmus.api.serve import Serving
from isthmus.api.stop import Stop
from isthmus.cli.options import notes, out
from isthmus.cli.terminal import Terminal, ended
from isthmus.federated.job import FederatedJob
from isthmus.fleet import dump_fleet
from isthmus.job import Job
from isthmus.report.fleet_tables import device_text, matrix_table

LOG_WIDTH = 140


def serve_job(job: Job, choices: Choices, where: Serving, *, json: bool) -> int:
    """The exit code."""
    return ended(lambda told: serve.serve_job(job, choices, where, told, Stop()), json=json)


def serve_federated(job: FederatedJob, choices: FederatedChoices, where: Serving, *, json: bool) -> int:
    """The exit code."""
    return ended(lambda told: serve.serve_federated(job, choices, where, told, Stop()), json=json)


def serve_submitted(where: Serving) -> int:
    """The exit code, after Ctrl-C."""
    serve.serve_submitted(where, Terminal(out(), notes()), _logged)
    return 130


def _logged(file: TextIO) -> Terminal:
    console = Console(file=file, width=LOG_WIDTH, markup=False)
    return Terminal(console, console)


def submit(state: Path | None, job: Job | FederatedJob) -> None:
    handed, told = submit_job(job, state), notes()
    typer.echo(handed.number)
    place = f"{handed.before} before it" if handed.before else "nothing before it"
    told.print(f"job {handed.number} ({job.name}) is queued, {place}", highlight=False)
    if not handed.served:
        told.print("no coordinator runs: `isthmus serve` without a job does what is queued", highlight=False)


def probe(asked: Probing, where: Serving, target: Path | None) -> None:
    told = Terminal(out(), notes())
    fleet = probe_devices(asked, where, told.note)
    for device in fleet.devices:
        told.note(f"{device.name}: {device_text(device)}")
    if target is None:
        typer.echo(dump_fleet(fleet))
        notes().print(matrix_table(fleet))
        return
    target.write_text(dump_fleet(fleet), encoding="utf-8")
    out().print(matrix_table(fleet))
    told.note(f"wrote {target}: --fleet {target} plans with it")
