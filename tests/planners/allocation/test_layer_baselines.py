"""Even, equal-compute and Sky's two allocations: the papers' words, transcribed slowly, and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import attempt, brute_force_s, check, layers_problem, naive_fits, random_layers

from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners import highs
from isthmus.planners.baselines.allocation import (
    LayerProblem,
    allocation,
    equal_compute_layers,
    even_layers,
    sky_heuristic_layers,
    sky_optimal_layers,
)

SEEDS = st.integers(0, 10**6)


def transcribed(problem: LayerProblem) -> list[int] | None:
    """Algorithms 1 and 2 of the paper as its text tells them, with lists and sums; None where memory fails."""
    lf = problem.layer_flops.tolist()
    dt, ct = problem.device_s_per_flop.tolist(), problem.device_latency_s.tolist()
    n = min(len(dt), len(lf))
    pi = [0]
    for i in range(n):
        pi.append(pi[-1] + len(lf) // n + (1 if i < len(lf) % n else 0))

    def holds(i: int, first: int, end: int) -> bool:
        return end <= first or naive_fits(problem, i, first, end)

    def satisfied() -> bool:
        return all(holds(i, pi[i], pi[i + 1]) for i in range(n))

    while not satisfied():
        old = list(pi)
        for i in range(n - 1):
            while not satisfied() and not holds(i, pi[i], pi[i + 1]) and pi[i + 1] - pi[i] > 1:
                pi[i + 1] -= 1
            while not satisfied() and pi[i + 2] - pi[i + 1] > 1 and holds(i, pi[i], pi[i + 1] + 1):
                pi[i + 1] += 1
        if pi == old and not satisfied():
            return None

    def workload(i: int, first: int, end: int) -> float:
        return sum(dt[i] * lf[j] + ct[i] for j in range(first, end))

    for _ in range(1000):
        target = sum(workload(i, pi[i], pi[i + 1]) for i in range(n)) / n
        old = list(pi)
        for i in range(n - 1):
            if workload(i, pi[i], pi[i + 1]) < target:
                if pi[i + 2] - pi[i + 1] > 1 and holds(i, pi[i], pi[i + 1] + 1):
                    pi[i + 1] += 1
            elif pi[i + 1] - pi[i] > 1 and workload(i + 1, pi[i + 1], pi[i + 2]) < target:
                remaining = workload(i, pi[i], pi[i + 1] - 1)
                if remaining > target and holds(i + 1, pi[i + 1] - 1, pi[i + 2]):
                    pi[i + 1] -= 1
        if pi == old:
            break
    return [pi[i + 1] - pi[i] for i in range(n)]


def exact_numbers(problem: LayerProblem) -> LayerProblem:
    """Paces and latencies in eighths, so that sums in any order are exact."""
    return LayerProblem(
        layer_flops=problem.layer_flops,
        layer_memory_bytes=problem.layer_memory_bytes,
        device_s_per_flop=np.ceil(problem.device_s_per_flop * 8) / 8,
        device_memory_bytes=problem.device_memory_bytes,
        device_latency_s=np.round(problem.device_latency_s * 8) / 8,
    )


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_heuristic_is_the_papers(seed: int) -> None:
    problem = exact_numbers(random_layers(seed, most_layers=24, most_devices=6))
    expected = transcribed(problem)
    found = attempt(sky_heuristic_layers, problem)
    assert (found is None) == (expected is None)
    if found is not None:
        check(problem, found)
        assert list(found.counts) == expected


def test_the_heuristic_moves_layers_from_a_slow_device_to_the_next() -> None:
    """Shares of 8 take 24, 8 and 8 s: the first gives away while its rest is above the mean."""
    found = sky_heuristic_layers(layers_problem([1.0] * 24, [3.0, 1.0, 1.0]))
    assert found.counts[0] < 8
    assert found.workload_s < 24


def test_memory_is_repaired_before_work_is_balanced() -> None:
    problem = layers_problem([1.0] * 6, [1.0, 1.0, 1.0], memory=[1.0, 2.0, 3.0])
    assert sky_heuristic_layers(problem).counts == (1, 2, 3)
    with pytest.raises(FleetTooSmall, match="short"):
        sky_heuristic_layers(layers_problem([1.0] * 6, [1.0] * 3, memory=[2.0, 2.0, 1.0]))


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_the_optimal_allocation_is_that_of_brute_force(seed: int) -> None:
    problem = random_layers(seed, most_layers=7)
    best = brute_force_s(problem)
    found = attempt(sky_optimal_layers, problem)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        check(problem, found)
        assert found.workload_s == pytest.approx(best, rel=2e-4)
        assert found.lower_bound_s <= best * (1 + 1e-9)
        assert found.gap < 3e-4


def test_out_of_work_the_better_simple_allocation_stands_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highs, "MOST_WORK", 1)
    rng = np.random.default_rng(0)
    problem = layers_problem(rng.uniform(1, 3, 30).tolist(), rng.uniform(1, 4, 6).tolist())
    found = sky_optimal_layers(problem)
    check(problem, found)
    assert found.workload_s <= min(even_layers(problem).workload_s, sky_heuristic_layers(problem).workload_s)
    assert 0 < found.lower_bound_s <= found.workload_s


@given(st.integers(1, 40), st.integers(1, 12))
def test_even_counts_differ_by_one_at_most(layers: int, devices: int) -> None:
    found = even_layers(layers_problem([1.0] * layers, [1.0] * devices))
    assert found.order == tuple(range(min(layers, devices)))
    assert max(found.counts) - min(found.counts) <= 1
    assert sorted(found.counts, reverse=True) == list(found.counts)


@settings(deadline=None)
@given(SEEDS)
def test_equal_compute_cuts_nearest_to_each_share_of_the_speed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    flops, pace = rng.uniform(1, 5, 12), rng.uniform(1, 4, 4)
    found = equal_compute_layers(layers_problem(flops.tolist(), pace.tolist()))
    ends = dict(zip(found.order, np.cumsum(found.counts).tolist(), strict=True))
    before = np.concatenate(([0.0], np.cumsum(flops)))
    last = 0
    for device in range(4):
        last = ends.get(device, last)
        share = before[-1] * (1 / pace[: device + 1]).sum() / (1 / pace).sum()
        assert abs(before[last] - share) == pytest.approx(np.abs(before - share).min())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layer_flops", np.array([1.0, -1.0]), r"layer_flops: got -1.0 .. 1.0, expected finite numbers from 0"),
        ("layer_memory_bytes", np.array([1.0]), r"layer_memory_bytes: got shape \(1,\), expected \(2,\)"),
        ("device_s_per_flop", np.array([0.0]), "device_s_per_flop: got 0.0 .. 0.0, expected finite numbers above 0"),
        ("device_latency_s", np.array([np.nan]), "device_latency_s: got nan"),
        ("device_memory_bytes", np.array([1.0, 2.0]), "device_memory_bytes: got shape"),
        ("memory_reach", np.array([[1, 3]]), "memory_reach: got 3, expected at most 2 layers"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: np.ndarray, message: str) -> None:
    fields = {
        "layer_flops": np.ones(2),
        "layer_memory_bytes": np.ones(2),
        "device_s_per_flop": np.ones(1),
        "device_memory_bytes": np.ones(1),
        "device_latency_s": np.zeros(1),
    }
    with pytest.raises(UserError, match=message):
        LayerProblem(**{**fields, field: value})


def test_counts_that_are_not_the_whole_chain_are_refused() -> None:
    with pytest.raises(UserError, match="got 1 devices with 1 layers, expected 2"):
        allocation(layers_problem([1.0, 1.0], [1.0]), [0], [1])
