"""Callbacks and trackers of a run: those that a call gives, and those that the job names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar, cast

import msgspec

from isthmus.callbacks import Callback, Callbacks, EarlyStopping, RunStarted, build_callback, check_callback
from isthmus.errors import UserError
from isthmus.graph.metrics import MetricFunction, Metrics, give_metric
from isthmus.job import JobDocument
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
