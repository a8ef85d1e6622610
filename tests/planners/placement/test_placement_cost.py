"""Matching, path and cost against brute force and against the paper's formula written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import literal_cost_s, random_problem

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.planners.placement import PlacementTask, evaluate, from_fleet, from_matrices
from isthmus.planners.placement.grouping import Landscape, bottleneck_matching, open_path, path_length_s

SHAPES = [(1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (4, 2)]


def symmetric(rng: np.random.Generator, nodes: int, high: int = 10) -> np.ndarray:
    cost = np.triu(rng.integers(0, high, size=(nodes, nodes)).astype(float), 1)
    return cost + cost.T


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_the_bottleneck_matching_is_that_of_brute_force(seed: int, size: int) -> None:
    cost = np.random.default_rng(seed).integers(0, 9, size=(size, size)).astype(float)
    least = min(max(cost[range(size), columns]) for columns in itertools.permutations(range(size)))
    found, columns = bottleneck_matching(cost)
    assert found == least
    assert sorted(columns) == list(range(size))
    assert max(cost[range(size), columns]) == least


@pytest.mark.parametrize("seed", range(3))
def test_large_matchings_are_as_good_as_small_ones_joined(seed: int) -> None:
    """Blocks on the diagonal, dear links elsewhere: the bottleneck is the worst block's."""
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(0, 99, size=(20, 20)).astype(float) for _ in range(3)]
    cost = np.full((60, 60), 1000.0)
    for k, block in enumerate(blocks):
        cost[20 * k : 20 * k + 20, 20 * k : 20 * k + 20] = block
    shuffle = rng.permutation(60)
    found, columns = bottleneck_matching(cost[shuffle])
    assert found == max(bottleneck_matching(block)[0] for block in blocks)
    assert sorted(columns) == list(range(60))
    assert cost[shuffle, columns].max() == found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_the_path_is_that_of_brute_force(seed: int, nodes: int) -> None:
    cost = symmetric(np.random.default_rng(seed), nodes)
    least = min(path_length_s(cost, list(order)) for order in itertools.permutations(range(nodes)))
    order = open_path(cost)
    assert path_length_s(cost, order) == least
    assert sorted(order) == list(range(nodes))


@pytest.mark.parametrize("seed", range(5))
def test_no_stretch_of_a_long_path_can_be_turned_with_profit(seed: int) -> None:
    cost = symmetric(np.random.default_rng(seed), 30, high=1000) + 1.0
    np.fill_diagonal(cost, 0.0)
    order = open_path(cost)
    assert sorted(order) == list(range(30))
    # That is what 2-opt promises.
    for i, j in itertools.combinations(range(31), 2):
        turned = order[:i] + order[i:j][::-1] + order[j:]
        assert path_length_s(cost, turned) >= path_length_s(cost, order) - 1e-6


def test_a_long_line_is_found() -> None:
    places = np.random.default_rng(0).permutation(25)
    cost = np.abs(places[:, None] - places).astype(float)
    assert path_length_s(cost, open_path(cost)) == 24


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.sampled_from([0, 2, 3]))
def test_the_cost_is_the_papers(seed: int, shape: tuple[int, int], sites: int) -> None:
    stages, replicas = shape
    problem, latency, bandwidth = random_problem(seed, stages, replicas, sites=sites)
    groups = np.random.default_rng(seed).permutation(stages * replicas).reshape(stages, replicas)
    found = evaluate(problem, groups)
    expected = literal_cost_s(problem, latency, bandwidth, [tuple(row) for row in groups.tolist()])
    assert found.total_s == pytest.approx(expected)
    assert {frozenset(row) for row in found.devices.tolist()} == {frozenset(row) for row in groups.tolist()}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES))
def test_neighbours_in_a_pipeline_keep_the_promised_hop(seed: int, shape: tuple[int, int]) -> None:
    problem, _, _ = random_problem(seed, *shape)
    found = evaluate(problem, np.arange(len(problem.kind)).reshape(shape))
    hops = [problem.hop_s[problem.kind[a], problem.kind[b]].max() for a, b in itertools.pairwise(found.devices)]
    assert sum(hops) == pytest.approx(found.pipeline_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_kinds_keep_every_link(seed: int, sites: int) -> None:
    problem, latency, bandwidth = random_problem(seed, 3, 3, sites=sites)
    # A site's asymmetric links to itself are one number, so all that matters is symmetrised.
    of_kind = (problem.latency_s[np.ix_(problem.kind, problem.kind)], (latency + latency.T) / 2)
    of_band = (problem.bandwidth_bytes_per_s[np.ix_(problem.kind, problem.kind)], (bandwidth + bandwidth.T) / 2)
    apart = ~np.eye(9, dtype=bool)
    for kinds, devices in (of_kind, of_band):
        assert np.array_equal(kinds[apart], devices[apart])
    assert len(problem.kind_sizes) <= sites


def test_a_fleet_is_the_same_problem_as_its_matrices() -> None:
    devices = tuple(
        Device(name=f"d{k}", region="abc"[k % 3], flops_per_s=1e9 * (1 + k % 2), memory_bytes=1) for k in range(6)
    )
    links = Links(
        default=Link(0.2, 5e6),
        intra=Link(0.001, 1e9),
        regions=(Route("a", "b", Link(0.1, 2e7)),),
        devices=(Route("d5", "d0", Link(0.3, 1e6)),),
    )
    fleet = Fleet(name="f", devices=devices, links=links)
    task = PlacementTask(stages=3, replicas=2, activation_bytes=1e6, parameter_bytes=1e7)
    latency, bandwidth = np.zeros((6, 6)), np.ones((6, 6))
    for i, j in itertools.permutations(range(6), 2):
        link = fleet.link(f"d{i}", f"d{j}")
        latency[i, j], bandwidth[i, j] = link.latency_s, link.bandwidth_bytes_per_s
    small, full = from_fleet(fleet, task), from_matrices(task, latency, bandwidth)
    for groups in (np.arange(6).reshape(3, 2), np.array([[0, 5], [3, 1], [2, 4]])):
        assert evaluate(small, groups).total_s == pytest.approx(evaluate(full, groups).total_s)
    assert len(small.kind_sizes) == 5


def test_a_landscape_gives_the_same_when_asked_again() -> None:
    problem, _, _ = random_problem(3, 2, 3)
    landscape = Landscape(problem.sync_s, problem.hop_s)
    assert landscape.hop_s((0, 1, 2), (3, 4, 5)) == landscape.hop_s((3, 4, 5), (0, 1, 2))
    assert landscape.group_s((0, 1, 2)) == Landscape(problem.sync_s, problem.hop_s).group_s((0, 1, 2))


def test_bad_input_is_refused_with_its_field() -> None:
    task = PlacementTask(stages=2, replicas=2, activation_bytes=1.0, parameter_bytes=1.0)
    good = np.ones((4, 4))
    with pytest.raises(UserError, match="devices: got 3, expected 2 stages x 2 replicas"):
        from_matrices(task, np.ones((3, 3)), np.ones((3, 3)))
    with pytest.raises(UserError, match=r"latency_s\[0, 1\]: got -1"):
        from_matrices(task, good - 2 * (np.arange(4) == 1), good)
    with pytest.raises(UserError, match=r"bandwidth_bytes_per_s\[0, 1\]: got 0"):
        from_matrices(task, good, np.zeros((4, 4)))
    with pytest.raises(UserError, match="bandwidth_bytes_per_s: got shape"):
        from_matrices(task, good, np.ones((4, 3)))
    with pytest.raises(UserError, match="stages: got 0"):
        PlacementTask(stages=0, replicas=2, activation_bytes=1.0, parameter_bytes=1.0)
    with pytest.raises(UserError, match="parameter_bytes: got nan"):
        PlacementTask(stages=1, replicas=2, activation_bytes=1.0, parameter_bytes=float("nan"))
    with pytest.raises(UserError, match="groups: got shape"):
        evaluate(from_matrices(task, good, good), np.zeros((2, 2), dtype=np.int64))
