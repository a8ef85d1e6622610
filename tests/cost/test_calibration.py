"""Calibration is exact where a trace follows its model: simulate with known lines, calibrate, compare."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, corrected
from isthmus.plans import (
    Edge,
    Plan,
    Prediction,
    Replica,
    Schedule,
    Stage,
    StageMemory,
    classic_in_flight,
)
from isthmus.protocol import RunSpec
from isthmus.simulator import Overheads, SimulationOptions, simulate
from isthmus.trace import Span, Trace, Track
from isthmus_testing.calibration import AffineFit, Calibration, Warmup, calibrate, fit, trimmed_mean

MICRO_BATCHES = 4
SPEC = RunSpec(steps=4, micro_batches=MICRO_BATCHES, micro_batch_size=1)


def plan_of(sizes: list[tuple[int, int, int]]) -> Plan:
    """A chain; per stage forward FLOPs, backward FLOPs and parameter bytes."""
    memory = StageMemory(weights=0, gradients=0, optimizer=0, activations=0)
    stages = tuple(
        Stage(
            device=f"d{k}",
            first=k,
            last=k,
            first_op="",
            last_op="",
            flops_forward=f,
            flops_backward=b,
            parameter_bytes=p,
            memory=memory,
        )
        for k, (f, b, p) in enumerate(sizes)
    )
    edges = tuple(
        Edge(source=k, target=k + 1, values=("v",), gradients=("v",), forward_bytes=1000, backward_bytes=1000)
        for k in range(len(sizes) - 1)
    )
    return Plan(
        model="m",
        fleet="f",
        planner="hand",
        micro_batch_size=1,
        micro_batches=MICRO_BATCHES,
        replicas=(
            Replica(
                stages=stages,
                edges=edges,
                micro_batches=MICRO_BATCHES,
                schedule=Schedule("1f1b", classic_in_flight("1f1b", len(sizes), MICRO_BATCHES)),
            ),
        ),
        predicted=Prediction(step_s=0, micro_batches=1, period_s=0, fill_s=0, eq3_step_s=0, bottleneck=""),
    )


def fleet_of(stages: int) -> Fleet:
    devices = tuple(Device(name=f"d{k}", region="r", flops_per_s=1e9, memory_bytes=1) for k in range(stages))
    return Fleet(name="f", devices=devices, links=Links(default=Link(0.05, 1e6)))


def simulated(plan: Plan, truth: Calibration) -> Warmup:
    options = SimulationOptions(
        durations=truth.durations(plan),
        overheads=Overheads(handover_s=truth.handover_s),
        header_bytes=truth.header_bytes,
    )
    return Warmup(plan, simulate(plan, fleet_of(len(plan.stages)), SPEC, options))


def sizes(least: int, most: int) -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most), st.integers(least, most))


lines = st.builds(AffineFit, fixed_s=st.floats(0.01, 0.1), slope=st.floats(1e-10, 1e-9))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), stages=st.integers(2, 4), handover_s=st.floats(1e-5, 1e-3), header_bytes=st.integers(0, 1000))
def test_two_plans_give_the_durations_of_a_third(
    data: st.DataObject, stages: int, handover_s: float, header_bytes: int
) -> None:
    # Two clearly different sizes, or the line between them is lost in rounding.
    first, second, third = (
        plan_of(data.draw(st.lists(sizes(*limits), min_size=stages, max_size=stages)))
        for limits in ((1, 10**8), (2 * 10**8, 10**9), (1, 10**9))
    )
    truth = Calibration(
        lines={(f"d{k}", work): data.draw(lines) for k in range(stages) for work in ("F", "B", "update")},
        tasklet_s=0.0,
        handover_s=handover_s,
        header_bytes=header_bytes,
    )
    found = calibrate([simulated(first, truth), simulated(second, truth)])
    assert found.durations(third) == pytest.approx(truth.durations(third), rel=1e-4, abs=1e-7)
    assert found.header_bytes == header_bytes
    assert found.handover_s == pytest.approx(handover_s, rel=1e-6, abs=1e-7)
    assert found.tasklet_s == pytest.approx(0.0, abs=1e-7)


def test_one_plan_gives_a_speed_per_device() -> None:
    plan, fleet = plan_of([(4_000_000, 8_000_000, 10), (2_000_000, 4_000_000, 10)]), fleet_of(2)
    slower = corrected(fleet, {"d1": 5e8}, {})
    warmup = Warmup(plan, simulate(plan, slower, SPEC, SimulationOptions()))
    found = calibrate([warmup])
    assert found.flops_per_s(plan) == pytest.approx({"d0": 1e9, "d1": 5e8})
    twice = plan_of([(8_000_000, 16_000_000, 10), (1_000_000, 2_000_000, 10)])
    assert found.durations(twice)[0, "B"] == pytest.approx(0.016)
    assert found.durations(twice)[1, "F"] == pytest.approx(0.002)


def span(track: Track, name: str, start_s: float, end_s: float, micro_batch: int, step: int = 1) -> Span:
    return Span(
        device="d0",
        track=track,
        name=name,
        start_s=start_s,
        end_s=end_s,
        step=step,
        micro_batch=micro_batch,
        other="" if track == "compute" else "d1",
    )


def test_waits_are_told_apart() -> None:
    """Times of one lane:  F0 .5 F1 ... 1 (gradient 0 arrives at 6) B0 .5 B1, with gradient 1 there before."""
    spans = (
        span("compute", "F", 0.0, 1.0, 0),
        span("compute", "F", 1.5, 2.5, 1),
        span("send", "forward", 2.0, 4.0, 0),  # handed over at 1.0, on a free link
        span("send", "forward", 4.0, 6.0, 1),  # handed over at 2.5 and queued
        span("receive", "backward", 5.0, 6.0, 0),
        span("receive", "backward", 6.0, 7.0, 1),
        span("compute", "B", 7.0, 9.0, 0),
        span("compute", "B", 9.5, 11.0, 1),
    )
    found = calibrate([Warmup(plan_of([(1, 1, 1)]), Trace(source="runtime", run="drawn", spans=spans))])
    assert found.tasklet_s == 0.5  # F0-F1 and B0-B1
    assert found.handover_s == 1.0  # the first send, and B0


def test_collection_belongs_to_the_update() -> None:
    spans = (span("compute", "collect", 0.0, 0.5, -1), span("compute", "update", 0.5, 2.5, -1))
    plan = plan_of([(1, 1, 100)])
    found = calibrate([Warmup(plan, Trace(source="runtime", run="drawn", spans=spans))])
    assert found.durations(plan)[0, "update"] == pytest.approx(2.5)


def test_the_first_step_does_not_count() -> None:
    spans = (span("compute", "F", 0.0, 99.0, 0, step=0), span("compute", "F", 99.0, 100.0, 0))
    plan = plan_of([(1, 1, 1)])
    found = calibrate([Warmup(plan, Trace(source="runtime", run="drawn", spans=spans))])
    assert found.durations(plan)[0, "F"] == pytest.approx(1.0)
    with pytest.raises(UserError, match="no step after the first"):
        calibrate([Warmup(plan, Trace(source="runtime", run="drawn", spans=spans[:1]))])


def test_an_unknown_device_is_named() -> None:
    trace = Trace(source="runtime", run="drawn", spans=(span("compute", "F", 0, 1, 0),))
    found = calibrate([Warmup(plan_of([(1, 1, 1)]), trace)])
    with pytest.raises(UserError, match="d1"):
        found.durations(plan_of([(1, 1, 1), (1, 1, 1)]))


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=6))
def test_fit_has_no_better_neighbour(points: list[tuple[float, float]]) -> None:
    """Least squares under coefficients of at least 0 is convex: no small allowed step makes it better."""
    line = fit(points)
    assert line.fixed_s >= 0 and line.slope >= 0

    def error(fixed_s: float, slope: float) -> float:
        return sum((fixed_s + slope * x - y) ** 2 for x, y in points)

    best = error(line.fixed_s, line.slope)
    for fixed_step, slope_step in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3), (1e-3, -1e-3), (-1e-3, 1e-3)):
        fixed_s, slope = line.fixed_s + fixed_step, line.slope + slope_step
        if fixed_s >= 0 and slope >= 0:
            assert error(fixed_s, slope) >= best - 1e-6 * (1 + best)


def test_trimmed_mean_drops_a_tenth_at_each_end() -> None:
    assert trimmed_mean([1000.0, *[2.0] * 8, -50.0]) == 2.0
    assert trimmed_mean([1.0, 3.0]) == 2.0
