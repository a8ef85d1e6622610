"""`isthmus serve`: one job on the devices of a fleet, a federated one at its sites, or all that are submitted."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from isthmus.api.federating import FederatedChoices, deploy
from isthmus.api.pipeline import Choices
from isthmus.cli.options import notes, out, state_folder
from isthmus.cli.queueing import run_queue
from isthmus.cli.serving import Serving, serving_fleet, teller
from isthmus.cli.terminal import Terminal, exit_code_of, show_training
from isthmus.errors import Interrupted
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.runtime.processes.interrupting import Stop
from isthmus.runtime.service.job_queue import JobQueue


def serve_job(
    job: Job, choices: Choices, json: bool, state: Path | None, serving: Serving, notes: Console
) -> int:  # fmt: skip
    """Until it has run; returns the exit code."""
    with serving_fleet(state, serving, teller(notes)) as service:
        return show_training(job, msgspec.structs.replace(choices, crew=service), json=json)


def serve_federated(
    job: FederatedJob, choices: FederatedChoices, json: bool, state: Path | None, serving: Serving
) -> int:  # fmt: skip
    """Until its rounds are done; returns the exit code."""
    told = Terminal(out(), notes(), json=json)
    try:
        return exit_code_of(deploy(job, choices, lambda say: serving_fleet(state, serving, say), told, Stop()))
    except Interrupted as e:
        told.note(str(e))
        return 130


def serve_submitted(state: Path | None, serving: Serving, notes: Console) -> int:
    """Until Ctrl-C; returns the exit code."""
    folder, say = (state or state_folder("fleet")).absolute(), teller(notes)
    with serving_fleet(folder, serving, say) as service:
        queue = JobQueue(folder)
        try:
            return run_queue(service, queue, folder, say)
        finally:
            queue.close()
