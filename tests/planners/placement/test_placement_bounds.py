"""Lower bounds never pass the best of all groupings, and are met where theory says so."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import all_groupings, literal_cost_s, random_problem
from tests.tiers import THOROUGH

from isthmus.planners.placement import (
    PlacementProblem,
    PlacementTask,
    evaluate,
    from_matrices,
    islands,
)
from isthmus_testing.placement import bounds, lower_bound_s, mixtures
from isthmus_testing.placement.bounds import compute_bound_s, group_bound_s, least_group_s, threshold_bound_s
from isthmus_testing.placement.mixtures import MixtureTables, count_mixtures, mixture_bound_s

pytestmark = pytest.mark.thorough

SHAPES = [(1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (4, 2)]
SLACK = 1e-7
NETWORKS = 500 if THOROUGH else 25


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.sampled_from([0, 2, 3]), st.booleans())
def test_bounds_stay_below_brute_force(seed: int, shape: tuple[int, int], sites: int, compute: bool) -> None:
    problem, latency, bandwidth = random_problem(seed, *shape, sites=sites, compute=compute)
    groupings = all_groupings(tuple(range(len(problem.kind))), shape[1])
    best = min(literal_cost_s(problem, latency, bandwidth, groups) for groups in groupings)
    fixed = compute_bound_s(problem)
    assert threshold_bound_s(problem) + fixed <= best + SLACK
    # What is known prunes: just above the best is where a bound that is too high would show.
    for known_s in (1e9, best - fixed + 0.5, best - fixed + 1e-3):
        assert mixture_bound_s(problem, known_s) + fixed <= best + SLACK
    assert lower_bound_s(problem, best) <= best


def every_link_differs(seed: int, stages: int, replicas: int) -> PlacementProblem:
    """Links of one device in four are slow, or of one site in two; so components, lone devices and odd sites occur."""
    rng = np.random.default_rng(seed)
    devices = stages * replicas
    slow = rng.uniform(1, 8, devices) if seed % 2 else np.where(rng.random(devices) < 0.25, 6.0, 1.0)
    site = rng.integers(rng.integers(1, 5), size=devices)
    apart = np.where(site[:, None] == site, 1.0, rng.uniform(1, 9))
    bandwidth = rng.uniform(1, 4, (devices, devices)) / (np.maximum(slow[:, None], slow) * apart)
    task = PlacementTask(
        stages=stages,
        replicas=replicas,
        activation_bytes=float(rng.uniform(0, 9)),
        parameter_bytes=float(rng.uniform(0, 40)),
    )
    return from_matrices(task, rng.uniform(0, 3, (devices, devices)), bandwidth)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (3, 3), (4, 2), (2, 4), (6, 1)])
def test_bounds_stay_below_brute_force_where_every_link_differs(shape: tuple[int, int]) -> None:
    tight = 0
    for seed in range(-(-NETWORKS // 6)):
        problem = every_link_differs(seed, *shape)
        devices = tuple(range(len(problem.kind)))
        found = [evaluate(problem, np.array(groups)) for groups in all_groupings(devices, shape[1])]
        best = min(found, key=lambda grouping: grouping.total_s)
        assert group_bound_s(problem) <= min(grouping.data_parallel_s for grouping in found) + SLACK
        for sync_s in (best.data_parallel_s, np.inf):
            allowed = [grouping.pipeline_s for grouping in found if grouping.data_parallel_s <= sync_s + SLACK]
            assert bounds.LongHops(problem).sum_s(sync_s) <= min(allowed) + SLACK
        with mock.patch.object(bounds, "MOST_KINDS", 0):
            by_devices = threshold_bound_s(problem)
            with mock.patch.object(bounds, "MOST_STAGES", 0):
                by_kinds = threshold_bound_s(problem)
        assert max(by_devices, by_kinds) <= best.total_s + SLACK
        tight += by_devices > 0.8 * best.total_s
    assert tight


def test_the_bound_stays_below_what_was_found_on_a_large_network() -> None:
    problem = every_link_differs(1, 8, 8)
    found = islands(problem, moves=100)
    assert 0.3 * found.total_s < lower_bound_s(problem, np.inf) <= found.total_s


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([1, 3, 10_000]))
def test_the_best_group_of_a_device_is_that_of_brute_force(seed: int, size: int, nodes: int) -> None:
    rng = np.random.default_rng(seed)
    sync_s = np.triu(rng.integers(0, 9, (8, 8)).astype(float), 1)
    sync_s += sync_s.T
    groups = [(0, *others) for others in itertools.combinations(range(1, 8), size - 1)]
    least_s = min(sync_s[np.ix_(group, group)].sum(axis=1).max() for group in groups)
    found_s = least_group_s(sync_s, 0, size, nodes=nodes)
    assert found_s <= least_s
    assert found_s == least_s or nodes < 10_000


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES))
def test_the_least_computation_is_that_of_brute_force(seed: int, shape: tuple[int, int]) -> None:
    problem, _, _ = random_problem(seed, *shape, compute=True)
    best = min(
        sum(max(problem.compute_s[d] for d in group) for group in groups)
        for groups in all_groupings(tuple(range(len(problem.kind))), shape[1])
    )
    assert compute_bound_s(problem) == best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(2, 3), (3, 2), (4, 2), (5, 1)]), st.sampled_from([2, 3]))
def test_few_mixtures_are_bounded_one_number_at_a_time(seed: int, shape: tuple[int, int], sites: int) -> None:
    """Against all groupings with just so many different mixtures, and with so many at least."""
    problem, latency, bandwidth = random_problem(seed, *shape, sites=sites)
    best: dict[int, float] = {}
    for groups in all_groupings(tuple(range(len(problem.kind))), shape[1]):
        different = len({tuple(sorted(problem.kind[list(group)])) for group in groups})
        cost = literal_cost_s(problem, latency, bandwidth, groups)
        best[different] = min(cost, best.get(different, np.inf))
    tables = MixtureTables(problem)
    slowest = float(tables.sync_s.max())
    for count in range(1, min(4, shape[0]) + 1):
        found = tables.least_with(count, slowest)
        assert found <= best.get(count, np.inf) + SLACK
        # Nothing is lost but inner hops that are longer than the least, so ways are found if and only if they exist.
        assert (found < np.inf) >= (count in best)
        more = [cost for different, cost in best.items() if different >= count]
        assert float(tables.sync_s.min()) + tables.pipeline_s(slowest, count) <= min(more, default=np.inf) + SLACK


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 5))
def test_mixtures_are_all_of_them(sizes: list[int], members: int) -> None:
    devices = [kind for kind, size in enumerate(sizes) for _ in range(size)]
    expected = {
        tuple(np.bincount(chosen, minlength=len(sizes)).tolist()) for chosen in itertools.combinations(devices, members)
    }
    found = mixtures.mixtures(np.array(sizes), members)
    assert {tuple(row) for row in found.tolist()} == expected
    assert len(found) == len(expected) == count_mixtures(np.array(sizes), members)


def islands_problem(sizes: list[int], stages: int, replicas: int, fast: float = 100.0):
    """Sites with fast links inside and slow ones between; sites of one device have no fast link at all."""
    site = np.repeat(np.arange(len(sizes)), sizes)
    bandwidth = np.where(site[:, None] == site, fast, 1.0)
    task = PlacementTask(stages=stages, replicas=replicas, activation_bytes=10.0, parameter_bytes=1.0)
    return from_matrices(task, np.zeros(bandwidth.shape), bandwidth)


@pytest.mark.parametrize(
    ("sizes", "stages", "replicas"), [([4, 4, 4], 4, 3), ([4, 4, 1, 1, 1, 1], 6, 2), ([8, 8], 4, 4), ([2] * 8, 4, 4)]
)
def test_islands_are_proven_optimal(sizes: list[int], stages: int, replicas: int) -> None:
    problem = islands_problem(sizes, stages, replicas)
    found = islands(problem, moves=250)
    assert lower_bound_s(problem, found.total_s) == pytest.approx(found.total_s)


def test_too_many_mixtures_give_no_bound_of_their_own() -> None:
    problem, _, _ = random_problem(0, 4, 4)
    assert mixture_bound_s(problem, 1e9) == 0.0
    assert threshold_bound_s(problem) > 0.0


def test_the_bound_is_positive_wherever_links_take_time() -> None:
    problem = islands_problem([1] * 12, 3, 4)
    assert lower_bound_s(problem, 1e9) == pytest.approx(3 * 2 / 4 + 2 * 2 * 10)
