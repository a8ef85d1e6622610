"""A coordinator of a fleet: it listens, and trains one job, at sites or on devices, or all submitted jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict, Unpack, cast

import msgspec

from isthmus.api.given import check_arguments
from isthmus.api.job_overrides import any_job_of
from isthmus.api.job_queue import Logged, run_queue
from isthmus.api.notebook import default_observer
from isthmus.api.observer import Observer, Written
from isthmus.api.page import page_beside
from isthmus.api.programs import program_of
from isthmus.api.run import Run
from isthmus.api.run_job import run_job
from isthmus.api.run_session import ATTACHED, Attached, Choices, attached_to, given_callbacks
from isthmus.api.serving_fleet import Serving, serving_fleet
from isthmus.api.states import state_folder
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.job_queue import JobQueue


def serve_job(job: Job | FederatedJob, choices: Choices, serving: Serving, observer: Observer, stop: Stop) -> Run:
    program_of(job).check(on_fleet=True)
    with serving_fleet(serving, observer.note) as service:
        return run_job(job, msgspec.structs.replace(choices, backend=service), observer, stop)


def serve_submitted(serving: Serving, observer: Observer, logged: Logged, *, dashboard: bool = False) -> None:
    """Until Ctrl-C. With `dashboard` a page shows the fleet."""
    folder = (serving.state or state_folder("fleet")).absolute()
    with (
        serving_fleet(msgspec.structs.replace(serving, state=folder), observer.note) as service,
        page_beside(folder if dashboard else None, observer.note, fleet=True),
        contextlib.closing(JobQueue(folder)) as queue,
    ):
        observer.note("waiting for devices (`isthmus join`) and for jobs (`isthmus submit JOB.toml`)")
        run_queue(service, queue, folder, observer.note, logged)


class Where(TypedDict, total=False):
    """Where a coordinator listens, and how it is reached."""

    host: str  # address to listen on; by default 127.0.0.1
    port: int  # the port, by default 7433; 0: any that is free
    addresses: tuple[str, ...]  # HOST or HOST:PORT by which devices reach it; by default `host`
    tickets: int  # so many are made at the start, each for one device; by default none
    ticket: Callable[[str], None]  # is given each ticket
    timeout: str  # silence after which a device is lost; by default "60 s"
    state: Path | None  # folder with the fleet's keys; by default ~/.local/state/isthmus/fleet


class HowServed(Where, Attached, total=False):
    """Where a coordinator listens, and how it is reached; callbacks and trackers of its job."""


def serve(
    job: Job | FederatedJob | str | Path | None = None,
    *,
    resume: bool = False,
    run: str | Path | None = None,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
    dashboard: bool = False,
    **given: Unpack[HowServed],
) -> Run | None:
    """Coordinate devices that join over TLS, and train a job once all that its plan names are here.

    Without a job it does what is submitted, one job after another, until Ctrl-C, and returns None. A federated job
    trains at the sites that it names. `resume`, `run`, `overrides`, `observer`, `stop`, `dashboard`, `callbacks`,
    `track`, `metrics` and `quiet` are as of `isthmus.train`; without a job the page shows the fleet.

    UserError for what is wrong with the job, the state folder or the address; PeerError where devices were lost and
    the run could not go on.

    >>> run = isthmus.serve("job.toml", host="10.0.0.1", tickets=2, ticket=print)  # doctest: +SKIP
    """
    check_arguments(serve, HowServed, given)
    observer, stop = observer or default_observer(quiet=given.get("quiet", False)), stop or Stop()
    listening = cast("Where", {name: value for name, value in given.items() if name not in ATTACHED})
    serving, folder = Serving(**listening), None if run is None else Path(run)
    if job is None:
        serve_submitted(serving, observer, Written, dashboard=dashboard)
        return None
    choices = Choices(resume=resume, run=folder, dashboard=dashboard, callbacks=given_callbacks(given))
    return serve_job(attached_to(any_job_of(job, overrides), given), choices, serving, observer, stop)
