"""The figures, events and pictures of a run for its trackers."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from isthmus.callbacks import Callback, Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.figures import figures_of
from isthmus.trackers.background import DRAIN_S, Act, BackgroundTracker
from isthmus.trackers.registry import tracker_builders
from isthmus.trackers.settings import Track
from isthmus.trackers.tracker import TrackedRun, flat

ID_FILE = "tracked.id"  # in the run's folder: what names the run in trackers, in all its sessions

SWITCH_S = 0.0005
"""The coordinator's own threads wait no longer for the interpreter while a tracker's computes: Python's 5 ms would be
added to each message."""


class TrackerCallback(Callback):
    """All trackers of a run. No method raises, and none but `end` waits."""

    def __init__(self, track: Track, note: Callable[[str], None], drain_s: float = DRAIN_S) -> None:
        """`note` gets a line for each tracker that fails. UserError for trackers that cannot be had."""
        self._track, self._note, self._drain_s = track, note, drain_s
        self._trackers = [BackgroundTracker(name, build) for name, build in tracker_builders(track).items()]
        self._faults = 0
        self._step = 0
        self._switch_s = sys.getswitchinterval()

    def start(self, started: RunStarted) -> None:
        self._step = started.first_step
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))
        try:
            run = self._described(started)
        except OSError as e:
            self._note(f"trackers get nothing: {started.run / ID_FILE}: {e.strerror or e}")
            self._trackers = []
            return
        self._put(lambda tracker: tracker.start(run))
        if started.kind == "pipeline":  # while its devices start; executors of federated runs are forked from here
            for tracker in self._trackers:
                tracker.begin()
        self._put_pictures(started.pictures)

    def step(self, done: StepDone) -> None:
        self._step = done.step
        figures = step_figures(done)
        self._put(lambda tracker: tracker.log(done.step, figures), figures=True)

    def evaluation(self, evaluated: Evaluated) -> None:
        found = {
            "heldout_loss": evaluated.loss,
            **evaluated.metrics,
            **{f"clients/{name}": value for name, value in evaluated.clients.items()},
        }
        figures = {name: value for name, value in found.items() if value is not None}
        if figures:
            self._put(lambda tracker: tracker.log(evaluated.step, figures), figures=True)

    def fault(self, fault: RunFault) -> None:
        self._faults += 1
        step, text, count = max(0, fault.step), str(fault), float(self._faults)
        self._put(lambda tracker: tracker.event(step, text))
        self._put(lambda tracker: tracker.log(step, {"faults": count}))

    def end(self, ended: RunEnded) -> None:
        self._put_pictures(ended.pictures)
        if ended.reason:
            step, reason = self._step, f"{ended.outcome}: {ended.reason}"
            self._put(lambda tracker: tracker.event(step, reason))
        self._put(lambda tracker: tracker.end(ended.outcome))
        until_s = time.monotonic() + self._drain_s
        for tracker in self._trackers:
            tracker.end()
        for tracker in self._trackers:
            tracker.wait(until_s - time.monotonic())
        sys.setswitchinterval(self._switch_s)
        self._complain()

    def _put(self, act: Act, *, figures: bool = False) -> None:
        for tracker in self._trackers:
            tracker.put(act, figures=figures)
        self._complain()

    def _put_pictures(self, pictures: Mapping[str, Path]) -> None:
        for name, path in pictures.items():
            self._put(lambda tracker, name=name, path=path: tracker.picture(name, path))

    def _complain(self) -> None:
        for tracker in self._trackers:
            if complaint := tracker.complaint():
                self._note(complaint)

    def _described(self, started: RunStarted) -> TrackedRun:
        file, folder = started.run / ID_FILE, started.run.absolute()
        known = file.is_file()
        id_ = file.read_text(encoding="utf-8").strip() if known else secrets.token_hex(16)
        if not known:
            file.write_text(id_ + "\n", encoding="utf-8")
        settings = flat(started.settings)
        if started.plan is not None:
            settings |= {"plan.predicted_step_s": started.plan.predicted.step_s, "plan.devices": len(started.plan.used)}
        return TrackedRun(
            name=folder.name,
            project=self._track.project,
            group=self._track.group,
            id=id_,
            resumed=known,
            folder=folder,
            settings=settings,
        )


def step_figures(done: StepDone) -> dict[str, float]:
    """Return the figures of a step or a round, by name."""
    several, rates = len(done.learning_rates) > 1, enumerate(done.learning_rates)
    learning = {f"learning_rate/{n}" if several else "learning_rate": rate for n, rate in rates}
    return figures_of(done) | learning | {f"busy/{device}": share for device, share in done.busy.items()}
