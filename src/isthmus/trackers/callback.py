"""The figures, events and pictures of a run for its trackers.

A tracker in a thread of its own: the run waits for it at its end only, and not for long.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from isthmus.callbacks import Callback, Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.figures import figures_of
from isthmus.trackers.tracker import Track, TrackedRun, Tracker, flat, tracker_builders

MOST_WAITING = 4096  # figures of so many steps wait for a tracker that is slow; those of more are left out
DRAIN_S = 30.0  # so long the end of a run waits for trackers

Act = Callable[[Tracker], None]


class BackgroundTracker:
    """Its calls, in their order. What one raises ends the tracker, and `complaint` says so once."""

    def __init__(self, name: str, build: Callable[[], object], most_waiting: int = MOST_WAITING) -> None:
        self.name = name
        self._build = build
        self._most_waiting = most_waiting
        self._waiting: deque[Act] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._failed = False
        self._left_out = 0
        self._complaints: deque[str] = deque()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def put(self, act: Act, *, figures: bool = False) -> None:
        """Queue a call. `figures` may be left out where too many wait. Starts the thread if `begin` has not."""
        with self._changed:
            if self._failed or self._ending:
                return
            if figures and len(self._waiting) >= self._most_waiting:
                self._left_out += 1
                return
            self._waiting.append(act)
            self._changed.notify()
        if figures:
            self.begin()

    def begin(self) -> None:
        """Its thread, with the library. Not before a process that will fork has done so."""
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Nothing more is put."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self.begin()  # a run of no step

    def wait(self, timeout_s: float) -> None:
        """For what was put, after `end`."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._complaints.append("is not done in time: what it has not written is lost")
        elif self._left_out and not self._failed:
            self._complaints.append(f"is slower than the run: figures of {self._left_out} steps were left out")

    def complaint(self) -> str:
        """Return a complaint for people, once; else an empty text."""
        return f"tracker {self.name} {self._complaints.popleft()}" if self._complaints else ""

    def _run(self) -> None:
        try:
            tracker = cast("Tracker", self._build())
            while (act := self._next()) is not None:
                act(tracker)
        except BaseException as e:  # SystemExit too: a library may not end the run
            with self._changed:
                self._failed = True
                self._waiting.clear()
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            self._complaints.append(f"failed, and gets nothing more: {reason[:300]}")

    def _next(self) -> Act | None:
        """None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None


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
        for name, path in ended.pictures.items():
            self._put(lambda tracker, name=name, path=path: tracker.picture(name, path))
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
            settings |= {
                "plan.predicted_step_s": started.plan.predicted.expected_s,
                "plan.devices": len(started.plan.used),
            }
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
