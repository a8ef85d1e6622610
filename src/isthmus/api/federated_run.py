"""A federated run: watched, in a folder that explains it all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from isthmus.api.observer import Observer
from isthmus.api.rounds_watch import RoundsWatch
from isthmus.api.run import Run
from isthmus.api.run_session import RunChoices, ending, run_session
from isthmus.api.watch import Watch
from isthmus.callbacks import RunEnded
from isthmus.combinations import refused
from isthmus.errors import PeerError
from isthmus.federated.history import RoundHistory, RoundLine
from isthmus.federated.job import FederatedJob, check_deployment, check_simulation
from isthmus.programs.merging import Finish
from isthmus.runtime.federated.run import FederatedRun
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator

Act = Callable[[], Finish]
ServeAs = Callable[[Callable[[str], None]], AbstractContextManager[FleetCoordinator]]
"""Opens a service, or one that is open already, that tells people what it does in this way."""
Begin = Callable[[Path, RoundsWatch], "tuple[RoundRunner, Act]"]


class RoundRunner(Protocol):
    """A run, wherever its clients train."""

    @property
    def first_round(self) -> int: ...
    @property
    def history(self) -> RoundHistory: ...


def run_simulated(job: FederatedJob, choices: RunChoices, observer: Observer, stop: Stop) -> Run:
    """Clients of a population, on executors of this machine. Raises Interrupted where it ended at once."""
    stop.check()
    check_simulation(job)

    def begin(folder: Path, watch: RoundsWatch) -> tuple[RoundRunner, Act]:
        run = FederatedRun(
            job,
            folder,
            resume=choices.resume,
            began=lambda: watch.began(run.first_round),
            watch=watch.round_done,
        )
        if job.store is not None and run.store.states is not None:
            raise refused("store", "client states", "one")
        count = len(run.machine.executors)
        several = f"{count} executor{'s' if count > 1 else ''}"
        what = f"{len(run.data.sizes)} clients, {several}, scheme {job.execution.scheme}"
        observer.note(f"{job.federated.algorithm} over {what}; a round ends with {run.machine.rules.description}")
        return run, lambda: run.run(watch.noted, stop)

    return _in_folder(job, choices, begin, observer, stop)


def deploy(job: FederatedJob, choices: RunChoices, serving: ServeAs, observer: Observer, stop: Stop) -> Run:
    """At the sites of the service that `serving` opens."""
    stop.check()
    check_deployment(job)

    def begin(folder: Path, watch: RoundsWatch) -> tuple[RoundRunner, Act]:
        run = SiteRun(
            job,
            folder,
            resume=choices.resume,
            began=lambda: watch.began(run.first_round),
            watch=watch.round_done,
        )

        def act() -> Finish:
            sites, ends = ", ".join(run.deployment.sites), run.machine.rules.description
            with serving(observer.note) as service:
                observer.note(f"{job.federated.algorithm} over sites {sites}; a round ends with {ends}")
                return run.run(service, watch.noted, stop)

        return run, act

    return _in_folder(job, choices, begin, observer, stop)


def _in_folder(job: FederatedJob, choices: RunChoices, begin: Begin, observer: Observer, stop: Stop) -> Run:
    with run_session(job, choices, observer) as session:
        folder, callbacks = session.folder.path, session.callbacks
        watch = Watch(session, observer)
        seen = RoundsWatch(job, watch, stop)
        run, finish = _watched(job, choices, folder, lambda path: begin(path, seen), observer)
        if finish is None:
            return Run(folder, "done")
        _draw(run.history.lines(), folder)
        outcome = ending(session.folder, finish.outcome, stop)
        result = Run(folder, outcome)
        watch.log.ended(outcome, result.reason or finish.reason)
        observer.reported(result)
        if line := choices.last_line(session.folder, outcome):
            observer.note(line)
        callbacks.end(RunEnded(run=folder, outcome=outcome, reason=result.reason, pictures=result.pictures))
        return result


def _watched(
    job: FederatedJob,
    choices: RunChoices,
    folder: Path,
    begin: Callable[[Path], tuple[RoundRunner, Act]],
    observer: Observer,
) -> tuple[RoundRunner, Finish | None]:
    observer.began(f"{job.federated.algorithm}, {job.federated.rounds} rounds")
    try:
        run, act = begin(folder)
        if run.first_round >= job.federated.rounds:
            observer.note(
                f"nothing left to do: {folder} has {run.first_round} rounds, the job asks for {job.federated.rounds}"
            )
            return run, None
        try:
            return run, act()
        except PeerError as e:
            raise PeerError(f"{e}; {choices.going_on(folder)}") from e
    finally:
        observer.ended()


def _draw(lines: list[RoundLine], folder: Path) -> None:
    if not lines:
        return
    pictures = importlib.import_module("isthmus.report.federated_pictures")  # with matplotlib, for half a second
    evaluated = [(line.record.round + 1, line.evaluation) for line in lines if line.evaluation is not None]
    pictures.draw_evaluations(evaluated, folder / "metrics.png")
    pictures.draw_round_timeline(lines[-1], folder / "round.png")
    pictures.draw_throughput(lines, folder / "paces.png")
