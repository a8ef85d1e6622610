"""A coordinator of a fleet: it listens, and trains one job, at sites or on devices, or all submitted jobs, one after
another."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO, TypedDict, TypeVar, Unpack, cast

import msgspec

from isthmus.api.folder import RunFolder
from isthmus.api.given import check_arguments
from isthmus.api.job_overrides import READERS, any_job_of
from isthmus.api.jobs import opened
from isthmus.api.notebook import default_observer
from isthmus.api.observer import Observer, Written
from isthmus.api.page import page_beside
from isthmus.api.run import Run
from isthmus.api.run_job import program_of, run_job
from isthmus.api.run_session import ATTACHED, Attached, Choices, attached_to, given_callbacks
from isthmus.api.serving_fleet import Serving, serving_fleet
from isthmus.api.states import state_folder
from isthmus.callbacks import Callback, RunStarted
from isthmus.errors import IsthmusError, UserError
from isthmus.extensions import modules_of
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.programs.queue import State
from isthmus.run_files import parse_job
from isthmus.runtime.identity.database import StoreError
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.job_queue import JobQueue, Submitted, job_log
from isthmus.runtime.service.status_file import read_status
from isthmus.sanitize import sanitize


class Handed(NamedTuple):
    number: int
    before: int  # jobs that wait or run
    served: bool  # whether a coordinator is there
    absent: tuple[str, ...]  # devices of the job's fleet that are not connected to it now


def submit_job(job: Job | FederatedJob, state: Path | None = None, file: Path | None = None) -> Handed:
    """Hand it in. Its runs are written to the current folder. UserError for what could not be run anyway."""
    names = program_of(job).submitted()
    with opened(state) as (queue, folder):
        number = queue.submit(job.name, job.kind, msgspec.json.encode(job), Path.cwd(), file)
        waiting = [j for j in queue.jobs() if j.state in ("queued", "running") and j.number != number]
        current_status = read_status(folder)
        if current_status is None or not current_status.fresh:
            return Handed(number, len(waiting), served=False, absent=())
        here = {device.name for device in current_status.devices}
        return Handed(number, len(waiting), served=True, absent=tuple(name for name in names if name not in here))


LOOK_S = 0.5  # how often to look into the queue
REMIND_S = 30.0  # how often to say that the queue cannot be written
Logged = Callable[[TextIO], Observer]  # writes each note into a job's log
Opened = Callable[[], contextlib.AbstractContextManager[Observer]]
Result = TypeVar("Result")


def run_queue(
    service: FleetCoordinator, queue: JobQueue, state_folder: Path, log: Callable[[str], None], logged: Logged
) -> None:
    """Returns once Ctrl-C came while a job ran; raises KeyboardInterrupt where it comes between jobs."""
    with queue.served():
        while True:
            job = _stored(queue.begin, log)
            if job is None:
                threading.Event().wait(LOOK_S)
                continue
            log(f"job {job.number} ({job.name}) begins")
            stop, stopped = Stop(), threading.Event()
            try:
                opened = partial(_opened, state_folder, job, logged)
                state, detail = _carried_out(job, service, queue, opened, stop, stopped)
            except OSError as e:  # of its log: a full disk, say. The other jobs go on
                state, detail = "failed", sanitize(f"its log cannot be written: {e.strerror or e}")
            _stored(partial(queue.end, job.number, state, detail), log)
            log(f"job {job.number} ({job.name}): {state}{': ' if detail else ''}{detail}")
            if state == "queued" or (stop.requested and not stopped.is_set()):
                return  # also where the job was over, or failed, as Ctrl-C came


def _stored(act: Callable[[], Result], log: Callable[[str], None]) -> Result:
    """Return its result as soon as the disk takes it: a full one must not end the coordinator, whose devices wait."""
    logged_s = -math.inf
    while True:
        try:
            return act()
        except StoreError as e:
            if not e.passes:
                raise
            if time.monotonic() - logged_s >= REMIND_S:
                logged_s = time.monotonic()
                log(f"{e}; trying again every {LOOK_S:g} s")
            time.sleep(LOOK_S)


def _carried_out(
    job: Submitted, service: FleetCoordinator, queue: JobQueue, opened: Opened, stop: Stop, stopped: threading.Event
) -> tuple[State, str]:
    """Run a job; return its state and the reason. `stopped` is set when somebody did not want it any more."""
    with opened() as observer:
        outcome = ""
        try:
            begins = _Begins()
            with _where_submitted(job), _watched(job.number, service, queue, begins, stop, stopped):
                outcome = _run(job, service, queue, observer, stop, begins)
        except IsthmusError as e:
            reason = sanitize(str(e))
        except KeyboardInterrupt as e:  # before or after what would have taken it to a good end
            observer.note(str(e))
            outcome, reason = "interrupted", ""
        except Exception as e:  # one job's fault, or ours: the others shall run all the same
            reason = sanitize(f"internal: {type(e).__name__}: {e}")
        else:
            reason = ""
        if reason:
            observer.note(f"error: {reason}")
            return "failed", reason
        if outcome == "interrupted":
            return ("stopped" if stopped.is_set() else "queued"), ""
        return "done", ""


@contextlib.contextmanager
def _opened(state_folder: Path, job: Submitted, logged: Logged) -> Generator[Observer]:
    log = job_log(state_folder, job.number)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with log.open("a", encoding="utf-8", buffering=1) as file:
        yield logged(file)


@contextlib.contextmanager
def _where_submitted(job: Submitted) -> Generator[None]:
    """UserError where that folder is gone, or is not for this process to see."""
    with modules_of([job.modules, job.directory]), contextlib.ExitStack() as there:
        try:
            there.enter_context(contextlib.chdir(job.directory))
        except OSError as e:
            raise UserError(f"job: was submitted from {job.directory}: {e.strerror}; submit it again") from None
        yield


class _Begins(Callback):
    """Knows whether the run has begun: before, it waits for devices."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def start(self, started: RunStarted) -> None:
        self.begun.set()


def _run(
    job: Submitted, service: FleetCoordinator, queue: JobQueue, observer: Observer, stop: Stop, begins: _Begins
) -> str:
    made = parse_job(job.document, READERS[job.kind].struct, "job")
    folder = _folder(job, made.run_dir, queue)
    again = f"isthmus resume {job.number}"
    choices = Choices(resume=folder.begun, run=folder.path, backend=service, again=again, callbacks=(begins,))
    return run_job(made, choices, observer, stop).outcome


def _folder(job: Submitted, parent: str, queue: JobQueue) -> RunFolder:
    """The one of its earlier sessions, or a new one."""
    if job.folder and Path(job.folder).is_dir():
        return RunFolder(Path(job.folder))
    folder = RunFolder.fresh(Path(parent).absolute(), job.name)
    queue.runs_in(job.number, folder.path)
    return folder


@contextlib.contextmanager
def _watched(
    number: int,
    service: FleetCoordinator,
    queue: JobQueue,
    begins: _Begins,
    stop: Stop,
    stopped: threading.Event,
) -> Generator[None]:
    """Ask the job to stop where its owner does not want it any more; `stopped` tells that from Ctrl-C. The queue says
    which devices it waits for until it begins."""
    over = threading.Event()

    def watch() -> None:
        shown: tuple[str, ...] = ()
        while not over.wait(LOOK_S):
            if queue.is_unwanted(number):
                stopped.set()
                stop.request()
                return
            absent = () if begins.begun.is_set() else service.current_status().awaited
            with contextlib.suppress(StoreError):  # a full disk: the next look tries again
                if absent and absent != shown:
                    queue.waits(number, absent)
                elif shown and not absent:
                    queue.begun(number)
                shown = absent

    watcher = threading.Thread(target=watch, name="stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


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
