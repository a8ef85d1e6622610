"""Tells the record, the observer, the callbacks and the store of a run what happens in it, of every program."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from isthmus.api.folder import RunFolder
from isthmus.api.observer import Observer
from isthmus.api.run_entries import ENTRIES, SPANS, LossPoint, RunEntry
from isthmus.api.stored_run import Uploads
from isthmus.callbacks import Callbacks, Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.callbacks.events import Ended
from isthmus.callbacks.loading import outcome_of
from isthmus.errors import UserError
from isthmus.figures import figures_of
from isthmus.graph.metrics import Metrics
from isthmus.job import Prepared
from isthmus.plans import Plan, PlanPeriod
from isthmus.protocol import Item
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.run_callbacks import FaultKind
from isthmus.trace import Span
from isthmus.training.optim import settings_of
from isthmus.units import format_duration


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


SPEED_STEPS = 16  # over which speeds are averaged: reports of several steps may come at once


class PipelineWatch:
    def __init__(self, prepared: Prepared, plan: Plan, watch: Watch) -> None:
        self.watch = watch
        self._job = job = prepared.job
        rate, steps = job.learning_rate.tabled(job.training.steps), job.training.steps
        self._settings = [settings_of(optimizer, rate, steps) for optimizer in job.optimizer]
        self._spec, self._metrics = run_spec(prepared), Metrics(job.metrics)
        ids = prepared.samples.columns.get("input_ids")
        self._tokens = ids.shape[0] if ids is not None and ids.shape else 0
        self._ends_s: deque[float] = deque(maxlen=SPEED_STEPS + 1)
        self._heldout: dict[int, list[tuple[int, Sequence[float]]]] = {}
        self._plan, self._epoch = plan, 0
        self._running = False

    def planned(self, plan: Plan, epoch: int) -> None:
        """The run goes on with this plan; it may be the plan of before."""
        self._running = True
        if plan != self._plan:
            step_s = format_duration(plan.predicted.expected_s)
            text = f"{step_s} a step on {', '.join(plan.used)}, as predicted"
            self.watch.fault(RunFault(step=self.watch.done, kind="plan", text=text, plan=plan))
        self._plan, self._epoch = plan, epoch

    def fault(self, kind: FaultKind, device: str, reason: str) -> None:
        """A device joins, is lost or leaves. Those that the run begins with are no news."""
        fault = RunFault(step=self.watch.done, kind=kind, device=device, text=reason)
        self.watch.fault(fault, told=self._running or kind != "joined")

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train":
            self.watch.stepped(self._trained(item, loss, spans), spans)
        else:
            self.watch.log.measured(spans)

    def _trained(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> StepDone:
        self._ends_s.append(time.monotonic())
        t = self._job.training
        busy: dict[str, float] = {}
        sent: dict[tuple[str, str], int] = {}
        for span in spans:
            if span.step == item.step and span.track == "compute":
                busy[span.device] = busy.get(span.device, 0.0) + span.end_s - span.start_s
            elif span.step == item.step and span.track == "send":
                sent[span.device, span.other] = sent.get((span.device, span.other), 0) + span.size_bytes
        steps = len(self._ends_s) - 1  # the first step's start is not known
        elapsed_s = (self._ends_s[-1] - self._ends_s[0]) / steps if steps else None
        rate = t.batch_size / elapsed_s if elapsed_s else None
        return StepDone(
            step=item.step + 1,
            steps=t.steps,
            loss=loss,
            learning_rates=tuple(cast("float", settings(item.step)["lr"]) for settings in self._settings),
            step_s=elapsed_s,
            link_bytes=sent,
            sent_bytes=sum(sent.values()),
            busy={device: min(1.0, busy_s / elapsed_s) for device, busy_s in busy.items()} if elapsed_s else {},
            tokens_per_s=rate * self._tokens if rate and self._tokens else None,
            samples_per_s=None if self._tokens else rate,
            devices=self._plan.used,
            period=self._plan.sync.period,
            plan_epoch=self._epoch,
        )

    def evaluated(self, item: Item, sums: Sequence[float]) -> None:
        """An evaluation comes in several items: its loss and metrics are all sums over all counts."""
        parts, spec = self._heldout.setdefault(item.step, []), self._spec
        weight = spec.eval_weight(item)
        parts.append((item.micro_batches, [weight * x for x in sums]))
        if sum(count for count, _ in parts) < spec.evaluated_micro_batches:
            return
        total, count, *more = map(sum, zip(*(found for _, found in parts), strict=True))
        loss = total / count if count else math.nan
        self.watch.evaluated(Evaluated(step=item.step, loss=loss, metrics=self._metrics.values(loss, more)))

    def rolled_back(self, step: int) -> None:
        self._heldout = {at: parts for at, parts in self._heldout.items() if at <= step}
        self._ends_s.clear()
        self.watch.rolled_back(step)
