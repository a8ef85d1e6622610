"""Reports to the coordinator of a pipeline, as steps, evaluations and faults."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import cast

from isthmus.api.watch import Watch
from isthmus.callbacks import Evaluated, RunFault, StepDone
from isthmus.graph.metrics import Metrics
from isthmus.job import Prepared
from isthmus.plans import Plan
from isthmus.protocol import Item
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.run_callbacks import FaultKind
from isthmus.trace import Span
from isthmus.training.optim import settings_of
from isthmus.units import format_duration

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
