"""Predictions of plans beside measurements: a run's plans, one after another, and the memory that stages took."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from isthmus.plans import Plan, PlanPeriod, Stage
from isthmus.protocol.failures import MemoryPeak
from isthmus.report.summary import (
    ComparisonSummary,
    DeviceMemoryUse,
    PlanComparison,
    comparison_summary,
    prediction_error,
)
from isthmus.report.tables import new_table, titled
from isthmus.trace import Trace, steady_step_s, step_times
from isthmus.units import format_size


def during(trace: Trace, periods: Sequence[PlanPeriod], number: int) -> Trace:
    """The part of the trace that belongs to a period: its steps, as often as they count. Steps that a later period
    repeats belong to the later period."""
    period = periods[number]
    end = min((later.first_step for later in periods[number + 1 :]), default=None)
    spans = tuple(
        span
        for span in trace.spans
        if span.step >= period.first_step and (end is None or span.step < end) and span.start_s >= period.since_s
    )
    return msgspec.structs.replace(trace, spans=spans, period=period.plan.period)


def compared_periods(predicted: Trace, measured: Trace, periods: Sequence[PlanPeriod]) -> tuple[PlanComparison, ...]:
    """A row for each plan under which a step was done. Periods of one plan in a row are one row, measured in the one
    with the most steps."""
    found: list[PlanComparison] = []
    numbered = itertools.groupby(range(len(periods)), key=lambda number: periods[number].plan)
    for plan, group in numbered:
        parts = [(during(measured, periods, n), during(predicted, periods, n)) for n in group]
        done = [part for part in parts if step_times(part[0]) and step_times(part[1])]
        if not done:
            continue
        real, simulated = max(done, key=lambda part: len(step_times(part[0])))
        steps = [step for part in done for step in step_times(part[0])]
        measured_s, predicted_s = steady_step_s(real), steady_step_s(simulated)
        found.append(
            PlanComparison(
                devices=plan.devices,
                first_step=min(steps) + 1,
                last_step=max(steps) + 1,
                measured_step_s=measured_s,
                predicted_step_s=predicted_s,
                error=prediction_error(predicted_s, measured_s),
                closed_form_step_s=plan.predicted.step_s,
            )
        )
    return tuple(found)


def last_period(measured: Trace, periods: Sequence[PlanPeriod]) -> int | None:
    """The number of the last period in which a step was done, if any was."""
    return next((n for n in reversed(range(len(periods))) if step_times(during(measured, periods, n))), None)


def run_summary(predicted: Trace, measured: Trace, periods: Sequence[PlanPeriod]) -> ComparisonSummary | None:
    """Compares prediction and measurement under the last plan that did a step, with a row per device; None if no step
    was done."""
    number = last_period(measured, periods)
    if number is None:
        return None
    parts = during(predicted, periods, number), during(measured, periods, number)
    summary = comparison_summary(*parts, periods[number].plan)
    return msgspec.structs.replace(summary, plans=compared_periods(predicted, measured, periods))


def memory_use(plan: Plan, peaks: Mapping[str, MemoryPeak]) -> tuple[DeviceMemoryUse, ...]:
    """Predicted and measured memory of each device of the plan that reported its peak."""
    found: dict[str, list[tuple[str, Stage]]] = {}
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.workers):
            name = str(index) if len(plan.replicas) == 1 else f"{number}.{index}"
            found.setdefault(stage.device, []).append((name, stage))
    return tuple(
        DeviceMemoryUse(
            device=device,
            stages=tuple(name for name, _ in held),
            predicted_bytes=sum(stage.memory.total for _, stage in held),
            peak_bytes=peaks[device].size_bytes,
            reserved_bytes=peaks[device].reserved_bytes,
            resident=peaks[device].resident,
        )
        for device, held in found.items()
        if device in peaks
    )


def memory_table(uses: Sequence[DeviceMemoryUse]) -> RenderableType:
    """A row for each device: memory as predicted, and as its allocator counted it."""
    numbers = ("predicted", "peak", "more or less", "reserved")
    table = new_table(("device", "stages", *numbers), numbers)
    for use in uses:
        table.add_row(
            Text(use.device),
            Text(", ".join(use.stages)),
            Text(format_size(use.predicted_bytes)),
            Text(format_size(use.peak_bytes) + "*" * use.resident),
            f"{use.excess:+.1%}",
            "" if use.resident else format_size(use.reserved_bytes),
        )
    captions = ["peak: in tensors; reserved: taken of the accelerator by torch's allocator"]
    if any(use.resident for use in uses):
        captions = captions * any(not use.resident for use in uses) + [
            "* on the CPU, by how much the process's resident set grew, without code: buffers and fragments with it"
        ]
    return titled("Memory of the devices", table, "\n".join(captions))
