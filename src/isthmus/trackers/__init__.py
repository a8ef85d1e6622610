"""Trackers: where a run's figures go besides its folder. An adapter per library behind one protocol."""

from isthmus.trackers.callback import ID_FILE, TrackerCallback
from isthmus.trackers.tracker import (
    Track,
    TrackedRun,
    Tracker,
    check_trackers,
    describe_tracker,
    tracker_builders,
    tracker_names,
    tracker_options,
)

__all__ = [
    "ID_FILE",
    "Track",
    "TrackedRun",
    "Tracker",
    "TrackerCallback",
    "check_trackers",
    "describe_tracker",
    "tracker_builders",
    "tracker_names",
    "tracker_options",
]
