"""One run, whatever its program: in its folder, watched, explained. Which program a job has is asked here."""

from __future__ import annotations

from isthmus.api.decoupled import Decoupled
from isthmus.api.observer import Observer
from isthmus.api.pipeline import Pipeline
from isthmus.api.rounds import USER, Rounds
from isthmus.api.run import Run
from isthmus.api.run_session import Choices, run_session
from isthmus.api.stored_run import open_store
from isthmus.errors import PeerError
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.run_files import keep_stop, stop_reason
from isthmus.runtime.launchers.ray_connection import check_cluster
from isthmus.runtime.processes.signals import Stop


def program_of(job: Job | FederatedJob) -> Pipeline | Rounds:
    """Return the program of a job; each has the methods of `Pipeline`."""
    if isinstance(job, FederatedJob):
        return Rounds(job)
    return Decoupled(job) if job.sync.mode == "decoupled" else Pipeline(job)


def check_here(job: Job | FederatedJob) -> None:
    """UserError for a job that cannot run here, and for a store or a cluster that it would not have."""
    program_of(job).check(on_fleet=False)
    if job.store is not None:
        open_store(job.store)
    if isinstance(job, FederatedJob) and job.runtime.backend == "ray":
        check_cluster(job.runtime.ray.address, USER)


def run_job(job: Job | FederatedJob, choices: Choices, observer: Observer, stop: Stop) -> Run:
    """To its end, or to a good end once it is to stop: then what is begun is finished, and saved. Raises Interrupted
    where it ended at once: before it began, or by a second Ctrl-C."""
    stop.check()
    program = program_of(job)
    program.check(on_fleet=choices.backend is not None, plan=choices.plan)
    with run_session(job, choices, observer) as watch:
        try:
            ran = program.run(choices, watch, stop)
        finally:
            observer.ended()
        if ran is None:
            return Run(watch.folder.path, outcome="done")
        if ran.outcome == "interrupted" and stop.reason:  # a callback asked for the end
            keep_stop(watch.folder.path, stop.reason)
            ran = ran._replace(outcome="stopped")
        if ran.outcome in ("done", "stopped", "interrupted"):
            ran = ran._replace(reason=stop_reason(watch.folder.path))
        watch.log.ended(ran.outcome, ran.reason)
        ran.explain()
        run = Run(watch.folder.path, ran.outcome)
        observer.reported(run)
        watch.ended(ran, run.pictures)
        if ran.outcome in ("lost", "diverged", "failed"):
            raise ran.failure or PeerError(ran.reason)
        if line := choices.last_line(watch.folder, ran.outcome):
            observer.note(line)
        return run
