"""A coordinator: one job on the devices of a fleet, a federated one at its sites, or all that are submitted."""

from __future__ import annotations

import msgspec

from isthmus.api.federated_results import FederatedResult
from isthmus.api.federating import FederatedChoices, deploy
from isthmus.api.listening import Serving, serving_fleet
from isthmus.api.observer import Observer
from isthmus.api.pipeline import Choices, run_job
from isthmus.api.queueing import Logged, run_queue
from isthmus.api.runs import Run
from isthmus.api.states import state_folder
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.job_queue import JobQueue


def serve_job(job: Job, choices: Choices, serving: Serving, observer: Observer, stop: Stop) -> Run:
    """Until it has run."""
    with serving_fleet(serving, observer.note) as service:
        return run_job(job, msgspec.structs.replace(choices, backend=service), observer, stop)


def serve_federated(
    job: FederatedJob, choices: FederatedChoices, serving: Serving, observer: Observer, stop: Stop
) -> FederatedResult:
    """Until its rounds are done."""
    return deploy(job, choices, lambda log: serving_fleet(serving, log), observer, stop)


def serve_submitted(serving: Serving, observer: Observer, logged: Logged) -> None:
    """Until Ctrl-C."""
    folder = (serving.state or state_folder("fleet")).absolute()
    with serving_fleet(msgspec.structs.replace(serving, state=folder), observer.note) as service:
        queue = JobQueue(folder)
        try:
            run_queue(service, queue, folder, observer.note, logged)
        finally:
            queue.close()
