"""Writes the entries and spans of a run into its folder, for who watches it. A log that cannot be written never ends
the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from isthmus.api.run_entries import ENTRIES, SPANS, RunEntry
from isthmus.callbacks import Evaluated, RunFault, RunStarted, StepDone
from isthmus.figures import figures_of
from isthmus.plans import PlanPeriod
from isthmus.trace import Span

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
        self._reason = ""
        """The reason of the last lost device: the run also notes it, which is not written again."""
        self._held: RunEntry | None = None
        """A step that was not written, as it came soon after another one."""

    def began(self, started: RunStarted) -> None:
        """A session goes on."""
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
        """A plan is in force from now on."""
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
        """Spans of an evaluation, or of a step."""
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
