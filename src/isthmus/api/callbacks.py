"""Callbacks and trackers of a run: those that a call gives, and those that the job names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

import msgspec

from isthmus.callbacks import Callback, Callbacks, build_callback, check_callback
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.trackers import Track, TrackerCallback, check_trackers

AnyJob = TypeVar("AnyJob", Job, FederatedJob)


class Attached(TypedDict, total=False):
    """What a call attaches to a run, whatever the run is of."""

    callbacks: Sequence[Callback]
    """Called before those of the job."""
    track: str | Sequence[str] | Track
    """Trackers by name, or a `Track`, in place of the job's."""


ATTACHED = frozenset(Attached.__annotations__)


def callbacks_of(job: Job | FederatedJob, given: Sequence[Callback], note: Callable[[str], None]) -> Callbacks:
    """All of a run; trackers come last. `note` gets a line for each tracker that fails. UserError for one that cannot
    be had."""
    named = [(type(one).__name__, check_callback("callbacks", one)) for one in given]
    named += [(config.name, build_callback(config)) for config in job.callback]
    if job.track.names:
        named.append(("track", TrackerCallback(job.track, note)))
    return Callbacks(named)


def given_callbacks(attached: Attached) -> tuple[Callback, ...]:
    """UserError for what is no list of callbacks."""
    found = attached.get("callbacks", ())
    if not isinstance(found, list | tuple):
        raise UserError(f"callbacks: got {found!r:.80}, expected a list of objects of classes from isthmus.Callback")
    return tuple(found)


def tracked(job: AnyJob, attached: Attached) -> AnyJob:
    """The job with the call's trackers. UserError."""
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
