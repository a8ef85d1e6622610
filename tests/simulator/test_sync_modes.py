"""The virtual clock of the sync modes against closed forms and the planners' timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.planners.sync import SyncProblem, WorkerProfile, plan_sync
from isthmus.planners.sync.build_sync_plan import sync_plan
from isthmus.planners.sync.timeline import iteration_s, timeline
from isthmus_testing.sync_modes import SyncChoices, SyncedLayer, SyncedModel, simulate_sync

times = st.floats(1e-3, 1.0)
layer_times = st.lists(st.tuples(times, times), min_size=1, max_size=8)


def model_of(
    layers: list[tuple[float, float]], period: int, latency_s: float = 0.0, forward_s: float = 0.0
) -> SyncedModel:
    """`forward_s` is each layer's own; half a second comes before all of them where it is none."""
    made = tuple(
        SyncedLayer(name=f"layer-{n}", forward_s=forward_s, backward_s=backward_s, average_s=average_s, size_bytes=1)
        for n, (backward_s, average_s) in enumerate(layers)
    )
    return SyncedModel(forward_s=0.0 if forward_s else 0.5, layers=made, latency_s=latency_s, period=period)


def problem_of(model: SyncedModel, *, overlap: bool = False) -> SyncProblem:
    forward_order = model.layers[::-1]
    count = len(forward_order)
    profile = WorkerProfile(
        worker="w",
        forward_s=tuple(layer.forward_s or model.forward_s / count for layer in forward_order),
        backward_s=tuple(layer.backward_s for layer in forward_order),
        average_s=tuple(layer.average_s for layer in forward_order),
    )
    names = tuple(layer.name for layer in forward_order)
    return SyncProblem(layers=names, workers=(profile,), iterations=model.period, forward_overlap=overlap)


@given(layer_times, st.integers(1, 5), st.booleans(), st.sampled_from(["dream", "dream-spread"]))
def test_a_schedule_takes_what_its_plan_says(
    layers: list[tuple[float, float]], period: int, overlap: bool, planner: str
) -> None:
    model = model_of(layers, period, forward_s=0.1)
    plan = plan_sync(planner, problem_of(model, overlap=overlap))
    choices = SyncChoices(plan=plan, forward_overlap=overlap)
    assert simulate_sync("dream", model, choices) == pytest.approx(plan.step_s)


@given(layer_times, st.integers(1, 4))
def test_a_spread_schedule_is_no_worse_than_intervals(layers: list[tuple[float, float]], period: int) -> None:
    problem = problem_of(model_of(layers, period, forward_s=0.1), overlap=True)
    assert plan_sync("dream-spread", problem).period_s <= plan_sync("dream", problem).period_s * (1 + 1e-9)


@given(layer_times)
def test_buckets_of_one_layer_are_wfbp(layers: list[tuple[float, float]]) -> None:
    model = model_of(layers, 1)
    line = timeline(problem_of(model).workers, forward_overlap=False)
    expected = iteration_s(line, range(len(layers)))
    assert simulate_sync("every-step", model, SyncChoices(bucket_bytes=1)) == pytest.approx(expected)


@given(layer_times, st.integers(1, 5), st.floats(0, 0.05))
def test_local_pays_for_its_average_in_the_open(
    layers: list[tuple[float, float]], period: int, latency_s: float
) -> None:
    model = model_of(layers, period, latency_s)
    expected = model.compute_s + (latency_s + model.wire_s(model.layers)) / period
    assert simulate_sync("local", model, SyncChoices()) == pytest.approx(expected)
    assert simulate_sync("outer", model, SyncChoices()) == pytest.approx(expected)


def test_streaming_hides_a_fragment_behind_the_next_step() -> None:
    layers = [(0.25, 1.0), (0.25, 1.5), (0.25, 0.5), (0.25, 1.0)]
    model = model_of(layers, 4)  # a step computes for 1.5 s
    assert simulate_sync("streaming", model, SyncChoices(delay=1)) == pytest.approx(1.5)
    # Without delay each fragment of one layer is waited for.
    assert simulate_sync("streaming", model, SyncChoices(delay=0)) == pytest.approx(1.5 + 4.0 / 4)
    # Twice as slow: 3 s of the one layer do not fit behind 1.5.
    slow = model_of([(b, 2 * a) for b, a in layers], 4)
    assert simulate_sync("streaming", slow, SyncChoices(delay=1)) > 1.5


@given(layer_times, st.integers(1, 5))
def test_no_mode_beats_the_bound(layers: list[tuple[float, float]], period: int) -> None:
    model = model_of(layers, period)
    sets = [range(len(layers)) if step == 0 else () for step in range(period)]
    plan = sync_plan(replace(problem_of(model), spare=1.0), "all at once", sets, past_gaps=True)
    for mode in ("every-step", "local", "outer", "partial", "dream", "dreamddp", "streaming"):
        taken_s = simulate_sync(mode, model, SyncChoices(plan=plan, bucket_bytes=1))
        assert taken_s >= model.bound_s * (1 - 1e-9)


@given(layer_times, st.floats(0, 0.05), st.integers(1, 4))
def test_of_s_sgd_the_more_is_hidden_the_sooner(
    layers: list[tuple[float, float]], latency_s: float, at_once: int
) -> None:
    model = model_of(layers, 1, latency_s)
    openly_s = simulate_sync("s-sgd", model, SyncChoices())
    assert openly_s == pytest.approx(model.compute_s + latency_s + model.wire_s(model.layers))  # Eq. 3 of the paper
    planned_s = simulate_sync("asc-wfbp", model, SyncChoices(at_once=at_once))
    wfbp_s = min(simulate_sync("every-step", model, SyncChoices(bucket_bytes=size)) for size in range(1, 9))
    assert planned_s <= wfbp_s * (1 + 1e-9)  # some message for each, or all in one, among its choices
    assert wfbp_s <= openly_s * (1 + 1e-9)
    assert planned_s >= max(model.compute_s, sum(max(0.0, layer.average_s - latency_s) for layer in model.layers))


@given(layer_times, st.integers(1, 4))
def test_in_the_open_the_layers_of_a_step_are_one_message(layers: list[tuple[float, float]], period: int) -> None:
    model = model_of(layers, period, latency_s=1e-3)
    plan = plan_sync("equal-number", problem_of(model))
    named = {layer.name: layer for layer in model.layers}
    sent = [[named[name] for name in plan.averaged(step)] for step in range(period)]
    open_s = sum(model.latency_s + model.wire_s(message) for message in sent if message)
    taken_s = simulate_sync("partial", model, SyncChoices(plan=plan, in_backward=False))
    assert taken_s == pytest.approx(model.compute_s + open_s / period)


def test_bad_use() -> None:
    model = model_of([(1.0, 1.0)], 1)
    with pytest.raises(UserError, match="unknown sync mode 'drea': did you mean 'dream'"):
        simulate_sync("drea", model, SyncChoices())
    with pytest.raises(UserError, match="got no plan"):
        simulate_sync("dream", model, SyncChoices())
    with pytest.raises(UserError, match="got none, expected at least one"):
        SyncedModel(forward_s=0.0, layers=(), latency_s=0.0, period=1)
    with pytest.raises(UserError, match="delay: got 2, expected at most the period of 1"):
        simulate_sync("streaming", model, SyncChoices(delay=2))
    with pytest.raises(UserError, match="period: got 0"):
        model_of([(1.0, 1.0)], 0)
