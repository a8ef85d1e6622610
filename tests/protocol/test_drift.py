"""When a device or a link is believed to be other than stated: after a window that says so, and not before."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.plans import Plan, Prediction, Replica, Schedule, Stage
from isthmus.plans.plan import StageMemory
from isthmus.protocol.drift import APART, LAG_STEPS, STEPS, Drift, DriftReport, RateChange, RateEstimator
from isthmus.trace import Span

FORWARD, BACKWARD, SPEED, BANDWIDTH, MESSAGE = 1000, 2000, 3000.0, 1e5, 50_000
near = st.floats(0.85, 1.15)
anything = st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(st.lists(near, min_size=2, max_size=2), st.lists(anything, min_size=3, max_size=3))))
def test_three_odd_steps_in_any_five_change_nothing(blocks: list[tuple[list[float], list[float]]]) -> None:
    """Two that are as usual in every five, whatever the others are."""
    estimator = RateEstimator(1.0)
    rates = [rate for usual, odd in blocks for rate in (*usual, *odd)]
    for step, rate in enumerate(rates):
        assert not estimator.add(float(step), rate)
    assert estimator.believed == 1.0


far = st.one_of(st.floats(0.01, 0.6), st.floats(1.7, 100))


@given(st.lists(near, max_size=20), far, st.lists(near, min_size=STEPS))
def test_what_lasts_is_believed_within_a_window(before: list[float], factor: float, noise: list[float]) -> None:
    estimator = RateEstimator(1.0)
    times = itertools.count(0.0, 10.0)
    for rate in before:
        assert not estimator.add(next(times), rate)
    since = [factor * rate for rate in noise[:STEPS]]
    told = [estimator.add(next(times), rate) for rate in since]
    assert any(told)
    assert min(since) <= estimator.believed <= max(since)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60))
def test_what_is_believed_is_never_far_from_a_window_that_agrees(rates: list[float]) -> None:
    """Whatever comes: right after a window of which most lie on one side, beyond the threshold, that is believed."""
    estimator = RateEstimator(1.0)
    for step, rate in enumerate(rates):
        estimator.add(float(step), rate)
        window = rates[max(0, step + 1 - STEPS) : step + 1]
        if len(window) == STEPS and min(window) > estimator.believed * APART:
            raise AssertionError(f"{window} against {estimator.believed}")
        if len(window) == STEPS and max(window) * APART < estimator.believed:
            raise AssertionError(f"{window} against {estimator.believed}")


def test_quick_steps_must_last_a_while() -> None:
    """A busy moment of a second is a hundred steps of ten milliseconds."""
    estimator = RateEstimator(1.0)
    for step in range(300):
        assert not estimator.add(step * 0.01, 1.0)
    assert not any(estimator.add(3.0 + step * 0.01, 0.2) for step in range(100))


def _fleet() -> Fleet:
    devices = tuple(Device(name=n, region="here", flops_per_s=SPEED, memory_bytes=1 << 30) for n in ("a", "b", "spare"))
    return Fleet(name="test", devices=devices, links=Links(default=Link(0.01, BANDWIDTH)))


def _plan() -> Plan:
    memory = StageMemory(weights=0, gradients=0, optimizer=0, activations=0)
    stages = tuple(
        Stage(
            device=name,
            first=k,
            last=k,
            first_op="x",
            last_op="x",
            flops_forward=FORWARD,
            flops_backward=BACKWARD,
            parameter_bytes=0,
            memory=memory,
        )
        for k, name in enumerate(("a", "b"))
    )
    replica = Replica(stages=stages, edges=(), micro_batches=2, schedule=Schedule("1f1b", (2, 1)))
    predicted = Prediction(step_s=1, period_s=1, fill_s=1, micro_batches=2, eq3_step_s=1, bottleneck="device a")
    return Plan(
        model="m",
        fleet="test",
        planner="test",
        micro_batch_size=1,
        micro_batches=2,
        replicas=(replica,),
        predicted=predicted,
    )


def _spans(step: int, slow: dict[str, float], link: float, *, hidden: str = "") -> Iterator[Span]:
    """A step of ten seconds: two micro-batches on each device, and what a sends b. `hidden`: which end's span of a
    message is as short as a buffer makes it."""
    at = 10.0 * step
    for device in ("a", "b"):
        for micro_batch, (name, flops) in itertools.product(range(2), (("F", FORWARD), ("B", BACKWARD))):
            seconds = flops / (SPEED * slow.get(device, 1.0))
            yield Span(
                device=device,
                track="compute",
                name=name,
                start_s=at,
                end_s=at + seconds,
                step=step,
                micro_batch=micro_batch,
            )
    for micro_batch, (device, track, other) in itertools.product(range(2), (("a", "send", "b"), ("b", "receive", "a"))):
        seconds = 1e-4 if track == hidden else MESSAGE / (BANDWIDTH * link)
        yield Span(
            device=device,
            track=track,
            name="forward",
            start_s=at,
            end_s=at + seconds,
            step=step,  # type: ignore[arg-type]
            micro_batch=micro_batch,
            size_bytes=MESSAGE,
            wire_bytes=MESSAGE if track == "send" else 0,
            other=other,
        )


def _noted(
    drift: Drift, steps: Sequence[int], slow: dict[str, float], link: float = 1.0, hidden: str = ""
) -> list[RateChange]:
    found: list[RateChange] = []
    for step in steps:
        found += drift.note(step, list(_spans(step, slow, link, hidden=hidden)))
    return found


def test_a_device_that_slows_down_and_a_link_that_drops_are_told_once() -> None:
    drift = Drift(_fleet())
    drift.begin(_plan(), 0)
    assert _noted(drift, range(20), {}) == []
    assert drift.fleet() == _fleet()
    found = _noted(drift, range(20, 20 + STEPS + LAG_STEPS), {"b": 0.25}, 0.1)
    assert {f.key for f in found} == {"b", ("a", "b")} and len(found) == 2
    believed = drift.fleet()
    assert believed.device("b").sustained_flops_per_s == pytest.approx(SPEED / 4)
    assert believed.device("a").sustained_flops_per_s == pytest.approx(SPEED)
    assert believed.link("a", "b").bandwidth_bytes_per_s == pytest.approx(BANDWIDTH / 10)
    assert believed.link("b", "a") == _fleet().link("b", "a") and believed.link("a", "b").latency_s == 0.01
    assert _noted(drift, range(30, 40), {"b": 0.25}, 0.1) == []
    back = _noted(drift, range(40, 50), {}, 0.1)
    assert [f.key for f in back] == ["b"] and drift.fleet().device("b").sustained_flops_per_s == pytest.approx(SPEED)


@pytest.mark.parametrize("hidden", ["send", "receive"])
def test_the_end_of_a_link_that_took_longer_knows(hidden: str) -> None:
    drift = Drift(_fleet())
    drift.begin(_plan(), 0)
    _noted(drift, range(20), {}, 0.5, hidden=hidden)
    assert drift.fleet().link("a", "b").bandwidth_bytes_per_s == pytest.approx(BANDWIDTH / 2)


def test_who_was_never_measured_is_as_far_from_what_was_stated_as_the_others_were_at_first() -> None:
    drift = Drift(_fleet())
    drift.begin(_plan(), 0)
    _noted(drift, range(20), {"a": 0.5, "b": 0.5})
    _noted(drift, range(20, 40), {"a": 0.5, "b": 0.1})
    speeds = {d.name: d.sustained_flops_per_s for d in drift.fleet().devices}
    assert speeds == pytest.approx({"a": SPEED / 2, "b": SPEED / 10, "spare": SPEED / 2})


def test_a_device_that_is_slow_from_the_beginning_says_nothing_of_the_others() -> None:
    drift = Drift(_fleet())
    drift.begin(_plan(), 0)
    _noted(drift, range(20), {"b": 0.25})
    speeds = {d.name: d.sustained_flops_per_s for d in drift.fleet().devices}
    assert speeds == pytest.approx({"a": SPEED, "b": SPEED / 4, "spare": SPEED})


def test_a_plans_first_step_and_what_was_before_do_not_count() -> None:
    drift = Drift(_fleet())
    drift.begin(_plan(), 0)
    _noted(drift, range(STEPS - 1), {"a": 0.1})
    drift.begin(_plan(), 3)
    assert _noted(drift, [3], {"a": 1e-6}) == []
    assert _noted(drift, range(4, 20), {}) == []
    assert statistics.fmean(d.sustained_flops_per_s for d in drift.fleet().devices) == SPEED


def test_a_probe_says_that_a_link_has_recovered() -> None:
    drift, link = Drift(_fleet()), ("a", "b")
    drift.begin(_plan(), 0)
    _noted(drift, range(20), {}, 0.1)
    assert drift.doubtful() == [], "it carries something: the work shows how fast it is"
    assert drift.tried(link, BANDWIDTH) == []
    drift.begin(_plan(), 20)  # as if a plan that does without it
    assert drift.doubtful() == [link]
    assert drift.tried(link, BANDWIDTH * 0.11) == [], "as slow as before"
    (found,) = drift.tried(link, 5 * BANDWIDTH)
    assert found.key == link and found.now == BANDWIDTH, "no faster than stated: a probe is short"
    assert drift.doubtful() == []
    assert drift.fleet().link(*link).bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)


def test_a_rate_that_swings_is_told_once_and_again_when_it_is_another() -> None:
    current_status = DriftReport()
    rates = [10e6, 5e6, 7e6, 5e6, 7e6, 4e6, 2e6, 3e6, 2e6, 9e6]
    told = [current_status.fresh(RateChange(("oslo", "tokyo"), a, b)) for a, b in itertools.pairwise(rates)]
    assert [bool(text) for text in told] == [True, False, False, False, False, True, False, False, True]
    assert told[5] == "oslo -> tokyo carries 16 Mbit/s, not 40 Mbit/s"
    assert current_status.fresh(RateChange(("tokyo", "oslo"), 10e6, 5e6))
