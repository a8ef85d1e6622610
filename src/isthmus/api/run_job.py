"""One run, whatever its program: in its folder, watched, explained."""

from __future__ import annotations

from isthmus.api.decoupled import check_replicas, run_decoupled
from isthmus.api.observer import Observer
from isthmus.api.pipeline import run_pipeline
from isthmus.api.rounds import check_rounds, run_rounds
from isthmus.api.run import Run
from isthmus.api.run_session import Choices, run_session
from isthmus.combinations import refused
from isthmus.errors import PeerError
from isthmus.federated.job import FederatedJob
from isthmus.job import Job, fleet_of
from isthmus.run_files import keep_stop, stop_reason
from isthmus.runtime.processes.signals import Stop


def run_job(job: Job | FederatedJob, choices: Choices, observer: Observer, stop: Stop) -> Run:
    """To its end, or to a good end once it is to stop: then what is begun is finished, and saved. Raises Interrupted
    where it ended at once: before it began, or by a second Ctrl-C."""
    stop.check()
    check_job(job, choices)
    with run_session(job, choices, observer) as watch:
        try:
            if isinstance(job, FederatedJob):
                ran = run_rounds(job, choices, watch, stop)
            elif job.sync.mode == "decoupled":
                ran = run_decoupled(job, choices, watch, stop)
            else:
                ran = run_pipeline(job, choices, watch, stop)
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


def check_job(job: Job | FederatedJob, choices: Choices) -> None:
    """Before anything begins. UserError for a job that cannot be run like this."""
    if isinstance(job, FederatedJob):
        check_rounds(job, on_fleet=choices.backend is not None)
    elif job.sync.mode == "decoupled":
        if choices.plan is not None:
            raise refused("a plan document", "decoupled", "one")
        check_replicas(job)


def check_on_fleet(job: Job | FederatedJob) -> None:
    """Before anything begins. UserError for a job that cannot run on devices or sites of a fleet."""
    if isinstance(job, FederatedJob):
        check_rounds(job, on_fleet=True)
        return
    fleet_of(job)
    if job.sync.mode == "decoupled":
        check_replicas(job)
