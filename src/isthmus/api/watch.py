"""A run's progress as events for its observer, points in the log, and calls of its callbacks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from isthmus.api.folder import RunFolder
from isthmus.api.losses import LossPoint
from isthmus.api.observer import Observer
from isthmus.api.run_log import RunLog
from isthmus.api.stored_run import Uploads
from isthmus.callbacks import Callbacks, Evaluated, RunFault, StepDone
from isthmus.graph.metrics import Metrics
from isthmus.job import Prepared
from isthmus.plans import Plan
from isthmus.protocol import Item
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.run_callbacks import FaultKind
from isthmus.trace import Span
from isthmus.training.optim import settings_of
from isthmus.units import format_duration

SPEED_STEPS = 16
"""Over which speeds are averaged: reports of several steps may come at once."""


class Watch:
    """Turns what the coordinator sees into events, logs, calls of callbacks and uploads."""

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        folder: RunFolder,
        observer: Observer,
        callbacks: Callbacks,
        uploads: Uploads,
    ) -> None:
        self.log = RunLog(folder.path, observer.note)
        self._job = job = prepared.job
        rate, steps = job.learning_rate.tabled(job.training.steps), job.training.steps
        self._settings = [settings_of(optimizer, rate, steps) for optimizer in job.optimizer]
        self._spec, self._metrics = run_spec(prepared), Metrics(job.metrics)
        self._folder = folder
        self._observer = observer
        self._callbacks = callbacks
        self._uploads = uploads
        ids = prepared.samples.columns.get("input_ids")
        self._tokens = ids.shape[0] if ids is not None and ids.shape else 0
        self._ends_s: deque[float] = deque(maxlen=SPEED_STEPS + 1)
        self._heldout: dict[int, list[tuple[int, Sequence[float]]]] = {}
        self._heldout_loss: float | None = None
        self._plan, self._epoch = plan, 0
        self._done, self._running = 0, False

    def began(self, step: int) -> None:
        """A session goes on after this step."""
        self._done = step
        self.log.began(step, self._job.training.steps)

    def planned(self, plan: Plan, epoch: int) -> None:
        """The run goes on with this plan; it may be the plan of before."""
        self._running = True
        if plan != self._plan:
            step_s = format_duration(plan.predicted.step_s)
            text = f"{step_s} a step on {', '.join(plan.used)}, as predicted"
            self._callbacks.fault(RunFault(step=self._done, kind="plan", text=text, plan=plan))
        self._plan, self._epoch = plan, epoch

    def fault(self, kind: FaultKind, device: str, reason: str) -> None:
        """A device joins, is lost or leaves."""
        match kind:
            case "joined":
                self.log.joined(device)
            case "lost":
                self.log.lost(device, reason)
            case "left":
                self.log.left(device)
        if self._running or kind != "joined":  # those that it begins with are no news
            self._callbacks.fault(RunFault(step=self._done, kind=kind, device=device, text=reason))

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        self._uploads.tell(self.noted)
        if item.kind == "train":
            self._trained(item, loss, spans)
            return
        self.log.measured(spans)

    def noted(self, text: str) -> None:
        self.log.noted(text)
        self._observer.note(text)

    def _trained(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        self._ends_s.append(time.monotonic())
        self._done = done = item.step + 1
        t = self._job.training
        if loss is not None:
            self._folder.log(LossPoint(step=done, loss=loss))
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
        facts = StepDone(
            step=done,
            steps=t.steps,
            loss=loss,
            heldout_loss=self._heldout_loss,
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
            run=self._folder.path,
        )
        self.log.stepped(facts, spans)
        self._observer.stepped(facts)
        self._callbacks.step(facts)

    def evaluated(self, item: Item, sums: Sequence[float]) -> None:
        """An evaluation comes in several items: its loss and metrics are all sums over all counts."""
        parts, spec = self._heldout.setdefault(item.step, []), self._spec
        weight = spec.eval_weight(item)
        parts.append((item.micro_batches, [weight * x for x in sums]))
        if sum(count for count, _ in parts) < spec.evaluated_micro_batches:
            return
        total, count, *more = map(sum, zip(*(found for _, found in parts), strict=True))
        loss = total / count if count else math.nan
        metrics = self._metrics.values(loss, more)
        self._heldout_loss = loss
        self._folder.log(LossPoint(step=item.step, loss=loss, split="heldout", metrics=metrics))
        self.log.evaluated(item.step, loss, metrics)
        found = Evaluated(step=item.step, loss=loss, metrics=metrics)
        self._observer.evaluated(found)
        self._callbacks.evaluation(found)

    def rolled_back(self, step: int) -> None:
        """Steps after this one will be reported once more."""
        self._folder.forget_losses(step)
        self._heldout = {at: parts for at, parts in self._heldout.items() if at <= step}
        self._ends_s.clear()
        self.log.went_back(step)
        self._observer.went_back(step)
        self._done = step
        self._callbacks.fault(RunFault(step=step, kind="back"))

    def saved(self, step: int, directory: Path) -> None:
        self._uploads.committed(directory, self._folder.path)
        self.log.saved(step)
        self._observer.saved(step, directory)
