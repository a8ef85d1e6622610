"""Writes the entries and spans of a run into its folder, for who watches it. A log that cannot be written never ends
the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.api.observer import StepDone
from isthmus.api.run_entries import ENTRIES, SPANS, RunEntry
from isthmus.plans import PlanPeriod
from isthmus.trace import Span

LEAST_S = 0.5
"""Between two entries of steps: a line for each of a hundred thousand quick steps would be read by nobody."""
MOST_STEPS = 20_000
"""The time between entries is this share of the session's length, so a session of weeks has some 100,000."""
MOST_SPANS = 500_000


class RunLog:
    """One session of a run. `began` opens the files; before that, and after an error, nothing is written."""

    def __init__(self, run: Path, note: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._run, self._note, self._clock = run, note, clock
        self._encoder = msgspec.json.Encoder()
        self._writes = False
        self._began_s = self._step_s = 0.0
        self._spans = self._sent_bytes = 0
        self._reason = ""
        """The reason of the last lost device: the run also notes it, which is not written again."""
        self._held: RunEntry | None = None
        """A step that was not written, as it came soon after another one."""

    def began(self, step: int, steps: int) -> None:
        """A session goes on after `step` of `steps`."""
        self._began_s = self._clock()
        try:
            (self._run / SPANS).write_bytes(b"")
            self._writes = True
        except OSError as e:
            self._failed(e)
        self._write(RunEntry(at_s=self._began_s, kind="began", step=step, steps=steps))

    def planned(self, period: PlanPeriod) -> None:
        """A plan is in force from now on."""
        first = period.first_step
        self._add(RunEntry(at_s=self._clock(), kind="planned", step=first, spans=self._spans, period=period))

    def stepped(self, done: StepDone, spans: Sequence[Span]) -> None:
        """`spans` are those that were reported since the step before."""
        now_s = self._clock()
        self.measured(spans)
        self._sent_bytes += sum(done.link_bytes.values())
        entry = RunEntry(
            at_s=now_s,
            kind="step",
            step=done.step,
            loss=done.loss,
            per_s=done.tokens_per_s or done.samples_per_s,
            unit="tokens/s" if done.tokens_per_s else "samples/s",
            busy=done.busy,
            sent=tuple((source, target, size) for (source, target), size in done.link_bytes.items()),
            sent_bytes=self._sent_bytes,
            spans=self._spans,
        )
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

    def evaluated(self, step: int, loss: float, metrics: Mapping[str, float | None] = {}) -> None:
        self._add(RunEntry(at_s=self._clock(), kind="heldout", step=step, loss=loss, metrics=metrics))

    def went_back(self, step: int) -> None:
        self._add(RunEntry(at_s=self._clock(), kind="back", step=step, spans=self._spans))

    def saved(self, step: int) -> None:
        self._add(RunEntry(at_s=self._clock(), kind="saved", step=step))

    def noted(self, text: str) -> None:
        if text != self._reason:
            self._add(RunEntry(at_s=self._clock(), kind="note", text=text))

    def joined(self, device: str) -> None:
        self._add(RunEntry(at_s=self._clock(), kind="joined", device=device))

    def lost(self, device: str, reason: str) -> None:
        self._reason = reason
        self._add(RunEntry(at_s=self._clock(), kind="lost", device=device, text=reason))

    def left(self, device: str) -> None:
        self._add(RunEntry(at_s=self._clock(), kind="left", device=device))

    def ended(self, outcome: str, reason: str = "") -> None:
        """The session is over. `reason` is empty where it went well."""
        if reason:
            self._add(RunEntry(at_s=self._clock(), kind="note", text=reason))
        self._add(RunEntry(at_s=self._clock(), kind="ended", text=outcome))

    def _add(self, entry: RunEntry) -> None:
        """After the step that it came after."""
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
