"""The surroundings of every run, whatever it trains: a folder that is claimed, callbacks, uploads, a page."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar, cast

import msgspec

from isthmus.api.folder import RunFolder
from isthmus.api.observer import Observer
from isthmus.api.page import page_beside
from isthmus.api.stored_run import chosen_folder, uploaded
from isthmus.api.watch import Watch
from isthmus.callbacks import Callback, Callbacks, EarlyStopping, RunStarted, build_callback, check_callback
from isthmus.errors import Interrupted, UserError
from isthmus.graph.metrics import MetricFunction, Metrics, give_metric
from isthmus.job import JobDocument
from isthmus.run_files import stop_reason
from isthmus.runtime.coordinator.backend import Backend
from isthmus.trackers import Track, TrackerCallback, check_trackers

AnyJob = TypeVar("AnyJob", bound=JobDocument)


class Attached(TypedDict, total=False):
    """Callbacks and trackers of a call, whatever the run trains."""

    callbacks: Sequence[Callback]  # called before those of the job
    track: str | Sequence[str] | Track  # trackers by name, or a `Track`, in place of the job's
    metrics: Sequence[str | MetricFunction]
    """Names and functions of (outputs, batch), in place of the job's: figures of evaluations beside the loss."""
    quiet: bool  # nothing is printed on standard error; without effect beside an `observer`


ATTACHED = frozenset(Attached.__annotations__)


def callbacks_of(job: JobDocument, run: Path, given: Sequence[Callback], note: Callable[[str], None]) -> Callbacks:
    """All of a run; trackers come last. `note` gets a line for each tracker that fails. UserError for one that cannot
    be had, before anything is written."""
    named = [(type(one).__name__, check_callback("callbacks", one)) for one in given]
    named += [(config.name, build_callback(config)) for config in job.callback]
    for _, one in named:
        if isinstance(one, EarlyStopping):
            one.check(run_started(job, run, 0, lambda _: None))
    if job.track.names:
        named.append(("track", TrackerCallback(job.track, note)))
    return Callbacks(named)


def run_started(job: JobDocument, run: Path, first_step: int, stop: Callable[[str], None]) -> RunStarted:
    """Return the event for callbacks at the start of a run in this folder, without its plan and its pictures."""
    metrics = Metrics(job.metrics)
    return RunStarted(
        run=run,
        kind=job.kind,
        steps=job.length,
        first_step=first_step,
        settings=msgspec.to_builtins(job),
        metrics=metrics.names,
        lower_is_better=metrics.lower_is_better,
        stop=stop,
    )


def given_callbacks(attached: Attached) -> tuple[Callback, ...]:
    """UserError for what is no list of callbacks."""
    found = attached.get("callbacks", ())
    if not isinstance(found, list | tuple):
        raise UserError(f"callbacks: got {found!r:.80}, expected a list of objects of classes from isthmus.Callback")
    return tuple(found)


def attached_to(job: AnyJob, attached: Attached) -> AnyJob:
    """The job with the call's metrics and trackers. UserError."""
    return _tracked(_measured(job, attached), attached)


def _measured(job: AnyJob, attached: Attached) -> AnyJob:
    metrics: object = attached.get("metrics")
    if metrics is None:
        return job
    if not isinstance(metrics, list | tuple):
        raise UserError(f"metrics: got {metrics!r:.80}, expected a list of names and functions of (outputs, batch)")
    changed = msgspec.structs.replace(job, metrics=tuple(map(give_metric, cast("list[object]", metrics))))
    changed.check_metrics()
    return changed


def _tracked(job: AnyJob, attached: Attached) -> AnyJob:
    track = attached.get("track")
    if track is None:
        return job
    if not isinstance(track, str | list | tuple | Track):
        raise UserError(f"track: got {track!r:.80}, expected the name of a tracker, a list of names, or a Track")
    if not isinstance(track, Track):
        names = (track,) if isinstance(track, str) else tuple(track)
        options = {name: table for name, table in job.track.options.items() if name in names}
        track = msgspec.structs.replace(job.track, to=names, options=options)
    check_trackers(track)
    return msgspec.structs.replace(job, track=track)


LEAVING_S = 5.0  # executors of a coordinator that was killed are copies of it and hold its claim until they notice
PYTHON_AGAIN = "resume=True, run={run}"


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    resume: bool = False
    run: Path | None = None
    again: str = PYTHON_AGAIN  # the command that resumes the run; `{run}` stands for its folder
    callbacks: tuple[Callback, ...] = ()  # besides the job's
    dashboard: bool = False  # whether the run is shown in a browser
    plan: Path | None = None  # a plan document to follow
    backend: Backend | None = None
    """Devices or sites of a fleet, at their own speed; None: processes here, emulated as the job says."""
    devices_stay: bool = True  # whether devices of a run that was left in its middle may be at work still

    def going_on(self, folder: Path) -> str:
        """Return how the run in this folder goes on, for a person."""
        return f"run folder {folder}; to go on: {self.again.replace('{run}', shlex.quote(str(folder)))}"

    def last_line(self, folder: RunFolder, outcome: str) -> str:
        """Return how the run ended, for a person; empty where it is done."""
        lines = {
            "stopped": f"stopped by {stop_reason(folder.path)}",
            "interrupted": f"interrupted: {self.going_on(folder.path)}",
        }
        return lines.get(outcome, "")


def folder_of(job: JobDocument, choices: Choices, note: Callable[[str], None]) -> RunFolder:
    """Return the folder of the run to resume, or a new one. UserError."""
    return chosen_folder(
        Path(job.run_dir), job.name, resume=choices.resume, run=choices.run, store=job.store, note=note
    )


@contextlib.contextmanager
def run_session(job: JobDocument, choices: Choices, observer: Observer) -> Generator[Watch]:
    """Raises UserError for a folder that is in use or of another kind of run, and Interrupted where the block ends at
    once: by a second Ctrl-C, or by one before the run began."""
    folder = folder_of(job, choices, observer.note)
    folder.check_kind(job.kind)
    page = page_beside(folder.path if choices.dashboard else None, observer.note)
    with folder.claimed(LEAVING_S if job.kind == "federated" and choices.resume else 0.0), page:
        try:
            callbacks = callbacks_of(job, folder.path, choices.callbacks, observer.note)
            with uploaded(job.store, folder, observer.note, resume=choices.resume) as uploads:
                watch = Watch(folder, callbacks, uploads, observer)
                with watch.session():
                    yield watch
        except KeyboardInterrupt:
            how = choices.going_on(folder.path) if folder.begun else "nothing was written"
            raise Interrupted(f"interrupted at once: {how}", folder.path if folder.begun else None) from None
