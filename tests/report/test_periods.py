"""A run that changes its plan compares each plan with the steps under it."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from isthmus.fleet import Fleet
from isthmus.plans import Plan, PlanPeriod
from isthmus.report import comparison_table, run_summary
from isthmus.trace import Span, Trace


def steps(device: str, numbers: range, since_s: float, step_s: float) -> list[Span]:
    """Steps of one forward and one update each."""
    found: list[Span] = []
    for count, number in enumerate(numbers):
        start_s = since_s + count * step_s
        for name, a, b in (("F", 0.0, 0.5), ("update", 0.5, 0.9)):
            found.append(
                Span(
                    device=device,
                    track="compute",
                    name=name,
                    start_s=start_s + a * step_s,
                    end_s=start_s + b * step_s,
                    step=number,
                )
            )
    return found


def on(plan: Plan, device: str) -> Plan:
    replica = plan.replica
    stage = msgspec.structs.replace(replica.stages[0], device=device)
    return msgspec.structs.replace(
        plan, replicas=(msgspec.structs.replace(replica, stages=(stage, *replica.stages[1:])),)
    )


@pytest.fixture
def periods(plan: Plan, fleet: Fleet) -> tuple[PlanPeriod, ...]:
    """Six steps under one plan, of which the last three are done again after a loss; then four under another."""
    first, second = on(plan, "quick"), on(plan, "slow")
    return (
        PlanPeriod(plan=first, fleet=fleet, first_step=0),
        PlanPeriod(plan=first, fleet=fleet, first_step=3, since_s=6.5),
        PlanPeriod(plan=second, fleet=fleet, first_step=7, since_s=20.0),
    )


def test_each_plan_has_its_own_row(periods: tuple[PlanPeriod, ...]) -> None:
    measured = [
        *steps("quick", range(6), 0.0, 1.0),
        *steps("quick", range(3, 7), 7.0, 1.0),
        *steps("slow", range(7, 11), 21.0, 3.0),
    ]
    predicted = [*steps("quick", range(3), 0.0, 1.1), *steps("quick", range(3, 7), 6.5, 1.1)]
    predicted += steps("slow", range(7, 11), 20.0, 2.4)
    traces = [Trace(source="simulator", run="x", spans=tuple(spans)) for spans in (predicted, measured)]
    summary = run_summary(traces[0], traces[1], periods)
    assert summary is not None
    rows = [(p.first_step, p.last_step, p.devices[0], p.measured_step_s, p.predicted_step_s) for p in summary.plans]
    assert rows == [
        (1, 7, "quick", pytest.approx(1.0), pytest.approx(1.1)),
        (8, 11, "slow", pytest.approx(3.0), pytest.approx(2.4)),
    ]
    assert [p.error for p in summary.plans] == [pytest.approx(0.1), pytest.approx(-0.2)]
    assert (summary.measured_step_s, summary.predicted_step_s) == (pytest.approx(3.0), pytest.approx(2.4))
    assert {use.device for use in summary.devices if use.measured_busy} == {"slow"}
    text = io.StringIO()
    Console(file=text, width=200, no_color=True).print(comparison_table(summary))
    assert "1 to 7" in text.getvalue() and "8 to 11" in text.getvalue()


def test_a_run_without_a_step_has_nothing_to_compare(periods: tuple[PlanPeriod, ...]) -> None:
    empty = Trace(source="runtime", run="x", spans=())
    assert run_summary(empty, empty, periods) is None
