"""Logs the computation of a pipeline's devices, step after step, in files of the replica's folder. Times count from the
beginning of the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from isthmus.plans import PlanPeriod
from isthmus.run_files import LinesFile
from isthmus.trace import Span

SPANS, PERIODS = "spans.jsonl", "periods.jsonl"
MOST_SPANS = 500_000  # the most spans of a replica: those of days of training would fill the disk
OVERRUN = 1.05  # times as long as planned: what is shorter is the clock's


class StepSpans(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of computing that devices reported with one step."""

    spans: tuple[Span, ...]


class PeriodBegun(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of the replica. Spans of its first step and of later ones are void that began before it."""

    first_step: int
    since_s: float
    step_s: float  # as planned
    devices: tuple[str, ...]


def spans_file(replica: Path) -> LinesFile[StepSpans]:
    return LinesFile(replica / SPANS, StepSpans, "spans")


def periods_file(replica: Path) -> LinesFile[PeriodBegun]:
    return LinesFile(replica / PERIODS, PeriodBegun, "periods")


class PipelineLog:
    """Writes them. What is written stays, however the replica's process ends."""

    def __init__(self, folder: Path, began_s: float) -> None:
        """`began_s`: the whole run, by the monotonic clock."""
        self._spans, self._periods = spans_file(folder), periods_file(folder)
        self._began_s = began_s
        self._written = 0
        self._least_s: dict[tuple[str, str], float] = {}
        """Seconds that a micro-batch takes as planned, by device and work."""
        self.late_s: dict[str, float] = {}  # seconds by which each device's tasks took longer
        self._origin_s: float | None = None  # from which the spans of this run count

    def begin(self) -> None:
        """A step is opened: times of spans count from the first of them."""
        if self._origin_s is None:
            self._origin_s = time.monotonic() - self._began_s

    def spans(self, spans: Iterable[Span]) -> None:
        later_s = self._origin_s or 0.0
        spans = [span for span in spans if span.track == "compute"]
        for span in spans:
            took_s, least_s = span.end_s - span.start_s, self._least_s.get((span.device, span.name), math.inf)
            if took_s > least_s * OVERRUN:
                self.late_s[span.device] = self.late_s.get(span.device, 0.0) + took_s - least_s
        found = tuple(
            msgspec.structs.replace(span, start_s=span.start_s + later_s, end_s=span.end_s + later_s) for span in spans
        )
        self._written += len(found)
        if found and self._written <= MOST_SPANS:
            self._spans.add(StepSpans(spans=found))

    def period(self, begun: PlanPeriod) -> None:
        """A plan came into force, by the monotonic clock."""
        for stage in (stage for replica in begun.plan.replicas for stage in replica.workers):
            flops_per_s = begun.fleet.device(stage.device).sustained_flops_per_s
            self._least_s[stage.device, "F"] = stage.flops_forward / flops_per_s
            self._least_s[stage.device, "B"] = stage.flops_backward / flops_per_s
        plan, since_s = begun.plan, begun.since_s - self._began_s
        found = PeriodBegun(
            first_step=begun.first_step, since_s=since_s, step_s=plan.predicted.step_s, devices=tuple(plan.used)
        )
        self._periods.add(found)
