"""Tells the record, the observer, the callbacks and the store of a run what happens in it, of every program."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.api.folder import RunFolder
from isthmus.api.losses import LossPoint
from isthmus.api.observer import Observer
from isthmus.api.run_entries import ENTRIES, SPANS, RunEntry
from isthmus.api.stored_run import Uploads
from isthmus.callbacks import Callbacks, Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.callbacks.events import Ended
from isthmus.callbacks.loading import outcome_of
from isthmus.errors import UserError
from isthmus.figures import figures_of
from isthmus.plans import PlanPeriod
from isthmus.trace import Span


class Ran(NamedTuple):
    outcome: Ended
    reason: str = ""  # why the run did not come to its end
    failure: Exception | None = None  # the error of a run that is lost or has diverged; None: `reason` says it all
    explain: Callable[[], None] = lambda: None  # writes traces, pictures and summaries into the folder


class Watch:
    """The watch of one session. `noted` and other methods may be called by several threads."""

    def __init__(self, folder: RunFolder, callbacks: Callbacks, uploads: Uploads, observer: Observer) -> None:
        self.folder, self.callbacks, self.uploads, self.observer = folder, callbacks, uploads, observer
        self.log = RunLog(folder.path, observer.note)
        self.done = 0
        self._heldout_loss: float | None = None

    def began(self, started: RunStarted) -> None:
        self.done = started.first_step
        self.log.began(started)
        self.callbacks.start(started)

    def stepped(self, done: StepDone, spans: Sequence[Span] = ()) -> None:
        """A step or a round is done; `spans` are those that were reported since the one before."""
        self.uploads.tell(self.noted)
        self.done = done.step
        done = msgspec.structs.replace(done, heldout_loss=self._heldout_loss, run=self.folder.path)
        if done.loss is not None:
            self.folder.log(LossPoint(step=done.step, loss=done.loss))
        self.log.stepped(done, spans)
        self.observer.stepped(done)
        self.callbacks.step(done)

    def evaluated(self, found: Evaluated) -> None:
        if found.loss is not None:
            self._heldout_loss = found.loss
            self.folder.log(LossPoint(step=found.step, loss=found.loss, split="heldout", metrics=dict(found.metrics)))
        self.log.evaluated(found)
        self.observer.evaluated(found)
        self.callbacks.evaluation(found)

    def fault(self, fault: RunFault, *, told: bool = True) -> None:
        """Something that is no step; callbacks hear of it where it is `told`."""
        self.log.fault(fault)
        if told:
            self.callbacks.fault(fault)

    def noted(self, text: str) -> None:
        self.log.fault(RunFault(step=self.done, kind="note", text=text))
        self.observer.note(text)

    def rolled_back(self, step: int) -> None:
        """Steps after this one will be reported once more."""
        self.folder.forget_losses(step)
        self.done = step
        self.observer.went_back(step)
        self.fault(RunFault(step=step, kind="back"))

    def ended(self, ran: Ran, pictures: Mapping[str, Path] = {}) -> None:
        self.log.ended(ran.outcome, ran.reason)
        ended = RunEnded(run=self.folder.path, outcome=ran.outcome, reason=ran.reason, pictures=pictures)
        self.callbacks.end(ended)

    @contextlib.contextmanager
    def session(self) -> Generator[None]:
        """Whatever ends the block by an error is an end too."""
        try:
            yield
        except BaseException as e:
            with contextlib.suppress(UserError):  # the first error is the reason
                self.ended(Ran(outcome_of(e), str(e)))
            raise

    def saved(self, step: int, directory: Path) -> None:
        self.uploads.committed(directory, self.folder.path)
        self.log.saved(step)
        self.observer.saved(step, directory)


LEAST_S = 0.5  # between two entries of steps: a line for each of a hundred thousand quick steps would be read by nobody
MOST_STEPS = 20_000
"""The time between entries is this share of the session's length, so a session of weeks has some 100,000."""
MOST_SPANS = 500_000


class RunLog:
    """One session of a run. `began` opens the files; before that, and after an error, nothing is written."""

    def __init__(self, run: Path, note: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._run, self._note, self._clock = run, note, clock
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.RLock()
        self._writes = False
        self._began_s = self._step_s = 0.0
        self._spans = 0
        self._reason = ""  # the reason of the last lost device: the run also notes it, which is not written again
        self._held: RunEntry | None = None  # A step that was not written, as it came soon after another one

    def began(self, started: RunStarted) -> None:
        self._began_s = self._clock()
        try:
            (self._run / SPANS).write_bytes(b"")
            self._writes = True
        except OSError as e:
            self._failed(e)
        unit = "round" if started.kind == "federated" else "step"
        step, steps = started.first_step, started.steps
        self._add(RunEntry(at_s=self._began_s, kind="began", step=step, steps=steps, counts=unit))

    def planned(self, period: PlanPeriod) -> None:
        first = period.first_step
        self._add(RunEntry(at_s=self._clock(), kind="planned", step=first, spans=self._spans, period=period))

    def stepped(self, done: StepDone, spans: Sequence[Span]) -> None:
        """`spans` are those that were reported since the step before."""
        now_s = self._clock()
        self.measured(spans)
        entry = RunEntry(
            at_s=now_s,
            kind="step",
            step=done.step,
            loss=done.loss,
            text=done.text,
            figures=figures_of(done),
            busy=done.busy,
            sent=tuple((source, target, size) for (source, target), size in done.link_bytes.items()),
            spans=self._spans,
        )
        with self._lock:
            if now_s - self._step_s < max(LEAST_S, (now_s - self._began_s) / MOST_STEPS):
                self._held = entry
                return
            self._step_s, self._held = now_s, None
            self._write(entry)

    def measured(self, spans: Sequence[Span]) -> None:
        if self._spans < MOST_SPANS and spans:
            self._append(SPANS, self._encoder.encode_lines(spans))
            self._spans += len(spans)

    def evaluated(self, found: Evaluated) -> None:
        self._add(RunEntry(at_s=self._clock(), kind="heldout", step=found.step, loss=found.loss, metrics=found.metrics))

    def fault(self, fault: RunFault) -> None:
        """A plan has an entry of its own: `planned`."""
        match fault.kind:
            case "lost":
                self._reason = fault.text
            case "note" if fault.text == self._reason:
                return
            case _:
                pass
        if fault.kind not in ("plan", "refused"):
            step = fault.step if fault.kind == "back" else -1
            entry = RunEntry(
                at_s=self._clock(), kind=fault.kind, step=step, device=fault.device, text=fault.text, spans=self._spans
            )
            self._add(entry)

    def saved(self, step: int) -> None:
        self._add(RunEntry(at_s=self._clock(), kind="saved", step=step))

    def ended(self, outcome: str, reason: str = "") -> None:
        """The session is over: nothing is written any more. `reason` is empty where it went well."""
        if reason:
            self._add(RunEntry(at_s=self._clock(), kind="note", text=reason))
        self._add(RunEntry(at_s=self._clock(), kind="ended", text=outcome))
        self._writes = False

    def _add(self, entry: RunEntry) -> None:
        """After the step that it came after."""
        with self._lock:
            if self._held is not None:
                step, self._held = self._held, None
                self._write(step)
            self._write(entry)

    def _write(self, entry: RunEntry) -> None:
        self._append(ENTRIES, self._encoder.encode(entry) + b"\n")

    def _append(self, name: str, lines: bytes) -> None:
        if not self._writes:
            return
        try:
            with (self._run / name).open("ab") as file:
                file.write(lines)
        except OSError as e:
            self._failed(e)

    def _failed(self, error: OSError) -> None:
        self._writes = False
        self._note(f"{self._run / ENTRIES}: cannot be written: {error.strerror or error}: the page lacks what follows")
