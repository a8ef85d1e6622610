"""A run's plans, one after another: what each predicted beside what was measured under it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from isthmus.plans import PlanPeriod
from isthmus.report.summary import ComparisonSummary, PlanComparison, comparison_summary, prediction_error
from isthmus.trace import Trace, steady_step_s, step_times


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
    return msgspec.structs.replace(trace, spans=spans, period=period.plan.sync.period)


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
