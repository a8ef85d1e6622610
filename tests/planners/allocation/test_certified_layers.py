"""The certified allocation against brute force: it is optimal, and its bound is a bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import (
    attempt,
    brute_force_s,
    check,
    layers_problem,
    naive_fits,
    naive_workload_s,
    random_layers,
)
from tests.tiers import represented_by

import isthmus_testing.allocation.certified as certified_module
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation import (
    Transfers,
    equal_compute_layers,
    even_layers,
    sky_heuristic_layers,
    sky_optimal_layers,
)
from isthmus_testing.allocation import certified_layers
from isthmus_testing.allocation.certified import CoverResult, anneal, cover, identical, pack
from isthmus_testing.allocation.windows import best_cut, out_of_reach, priced_bound_s

SEEDS = st.integers(0, 10**6)


@settings(max_examples=120, deadline=None)
@given(SEEDS)
def test_any_layers_are_allocated_as_well_as_by_brute_force(seed: int) -> None:
    problem = random_layers(seed)
    best = brute_force_s(problem)
    found = attempt(certified_layers, problem)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        check(problem, found)
        assert found.workload_s == pytest.approx(best, rel=1e-8)
        assert found.lower_bound_s == pytest.approx(best, rel=1e-8)


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_layers_that_are_alike_are_counted_as_well_as_by_brute_force(seed: int) -> None:
    problem = random_layers(seed, alike=True)
    assert identical(problem)
    best = brute_force_s(problem)
    found = attempt(certified_layers, problem)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        check(problem, found)
        assert found.workload_s == pytest.approx(best, rel=1e-12)
        assert found.gap < 1e-12


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_any_prices_prove_only_what_is_true(seed: int, prices: list[int]) -> None:
    problem = random_layers(seed)
    best = brute_force_s(problem)
    given_prices = np.array(prices[: problem.layers], dtype=float)
    if given_prices.any() and best < float("inf"):
        assert not out_of_reach(problem, given_prices, best)
        assert priced_bound_s(problem, given_prices, 0.0, 2 * best + 1) <= best


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.5, 2.0))
def test_the_integer_programme_answers_as_brute_force_does(seed: int, factor: float) -> None:
    problem = random_layers(seed)
    best = brute_force_s(problem)
    limit = factor * (best if best < float("inf") else 10.0) + 1e-6
    if not best or abs(limit / best - 1) > 1e-6:
        possible = cover(problem, problem.layer_flops + 1e-9, limit) is not CoverResult.IMPOSSIBLE
        assert possible == (best < limit)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(1.0, 2.0))
def test_a_packed_order_keeps_the_limit(seed: int, factor: float) -> None:
    problem = random_layers(seed)
    best = brute_force_s(problem)
    if best < float("inf"):
        order = pack(problem, problem.layer_flops + 1e-9, best * factor)
        assert order is None or len(set(order)) == len(order)
        if order is not None:
            start = 0
            for device in order:
                ends = [
                    e for e in range(start, problem.layers + 1) if problem.workload_s(device, start, e) <= best * factor
                ]
                start = min(max(ends), int(problem.memory_end(device, start)))
            assert start == problem.layers


@settings(max_examples=8, deadline=None)
@given(SEEDS, st.floats(0.9, 1.5))
def test_an_annealed_order_keeps_the_limit(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    problem = layers_problem(rng.uniform(1, 3, 9).tolist(), rng.uniform(1, 3, 4).tolist())
    limit = factor * brute_force_s(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certified_module, "MOST_STEPS", 10_000)  # of four devices that is enough
        order = anneal(problem, limit, seed)
    if order is not None:
        assert sorted(order) == [0, 1, 2, 3]
        assert best_cut(problem, order, 0.0, limit) is not None
    assert (order is not None) == (factor >= 1) or abs(factor - 1) < 0.01


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_one_order_is_cut_as_well_as_by_trying_all_cuts(seed: int) -> None:
    problem = random_layers(seed, most_layers=6)
    best = float("inf")
    for inner in itertools.combinations_with_replacement(range(problem.layers + 1), problem.devices - 1):
        runs = list(enumerate(itertools.pairwise((0, *inner, problem.layers))))
        if all(a == b or naive_fits(problem, d, a, b) for d, (a, b) in runs):
            best = min(best, max(naive_workload_s(problem, d, a, b) for d, (a, b) in runs if a < b))
    found = best_cut(problem, range(problem.devices), 0.0, 1e6)
    assert (found is None) == (best == float("inf"))
    assert found is None or found.workload_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", represented_by(range(3), 2))
def test_it_is_never_above_the_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    flops = (rng.permutation([3.0, 1.0, 4.0, 0.1, 4.0] * 4) * rng.uniform(0.9, 1.1, 20)).tolist()
    problem = layers_problem(
        flops,
        rng.uniform(1, 4, 5).tolist(),
        sizes=rng.uniform(1, 2, 20).tolist(),
        memory=rng.uniform(7, 16, 5).tolist(),
        latency=rng.uniform(0, 1, 5).tolist(),
    )
    best = certified_layers(problem)
    check(problem, best)
    assert best.gap < 1e-8
    others = [attempt(make, problem) for make in (even_layers, equal_compute_layers, sky_heuristic_layers)]
    others.append(sky_optimal_layers(problem))
    for other in filter(None, others):
        assert best.workload_s <= other.workload_s * (1 + 1e-9)
        assert other.lower_bound_s <= best.workload_s


def test_ten_thousand_devices_are_counted_exactly() -> None:
    rng = np.random.default_rng(0)
    pace, latency = rng.uniform(1, 5, 10_000), rng.uniform(0, 2, 10_000)
    problem = layers_problem([1.0] * 30_000, pace.tolist(), latency=latency.tolist())
    found = certified_layers(problem)
    check(problem, found)
    just_below = found.workload_s * (1 - 1e-12)
    assert np.clip(np.floor((just_below - latency) / pace + 1e-13), 0, None).sum() < 30_000
    assert found.gap < 1e-12


def test_without_programmes_the_bound_is_still_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layers_problem([3.0, 1.0, 2.0, 5.0, 1.0, 2.0], [1.0, 2.0, 3.0])
    exact = certified_layers(problem)
    monkeypatch.setattr(certified_module, "EXACT_CELLS", 0)
    monkeypatch.setattr(certified_module, "PRICED_CELLS", 0)
    counted = certified_layers(problem)
    assert 0 < counted.lower_bound_s <= exact.workload_s <= counted.workload_s
    monkeypatch.setattr(certified_module, "TABLE_CELLS", 0)
    simple = certified_layers(problem)
    assert simple.workload_s == min(
        make(problem).workload_s for make in (even_layers, equal_compute_layers, sky_heuristic_layers)
    )
    assert 0 < simple.lower_bound_s <= exact.workload_s


def test_a_link_costs_the_longer_of_compute_and_receipt() -> None:
    links = Transfers(boundary_bytes=np.array([0.0, 6.0, 1.0]), device_s_per_byte=np.array([1.0, 1.0]))
    found = certified_layers(layers_problem([2.0, 2.0, 4.0], [1.0, 1.0], transfers=links))
    assert found.workload_s == 4.0
    assert found.counts == (2, 1)


def test_a_device_that_only_delays_is_left_out() -> None:
    found = certified_layers(layers_problem([1.0, 2.0], [1.0, 1.0], latency=[0.0, 9.0]))
    assert (found.order, found.counts, found.workload_s) == ((0,), (2,), 3.0)


@pytest.mark.parametrize(
    ("sizes", "memory", "message"),
    [
        ([1.0, 5.0, 1.0], [4.0, 3.0], "device 0 cannot hold layers 1..1: .* 1 B short"),
        ([3.0, 2.0, 2.0], [3.0, 3.0], "no order of the devices holds the layers: 1 B short in all"),
        ([2.0, 1.0, 2.0], [3.0, 1.0, 1.0], "no order of the devices holds the layers: whole layers do not go"),
        ([2.0, 2.0, 2.0], [3.0, 3.0], "equal layers of 2 B.*: the devices hold 2 of them, so 1 are without a place"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(sizes: list[float], memory: list[float], message: str) -> None:
    flops = [1.0, 1.0, 1.0]
    with pytest.raises(FleetTooSmall, match=message):
        certified_layers(layers_problem(flops, [1.0] * len(memory), sizes=sizes, memory=memory))
