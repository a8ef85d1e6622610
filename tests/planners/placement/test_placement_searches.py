"""The paper's local searches against slow transcriptions, and all searches against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import all_groupings, literal_cost_s, random_problem
from tests.tiers import represented_by

from isthmus.planners.placement import (
    PLACEMENTS,
    PlacementTask,
    dtfm_genetic,
    dtfm_genetic_code,
    dtfm_kl,
    evaluate,
    from_matrices,
    random_groups,
)
from isthmus.planners.placement.dtfm import (
    crossover,
    cyclic_search,
    fastest_link_gain,
    groups_of,
    kernighan_lin_gain,
    labels_of,
    worse_parent,
    worst_of_all,
)

Table = list[list[float]]
NO = -math.inf


def links(seed: int, devices: int) -> np.ndarray:
    cost = np.triu(np.random.default_rng(seed).integers(0, 9, size=(devices, devices)).astype(float), 1)
    return cost + cost.T


def some_labels(seed: int, groups: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(groups), size))


def slow_fastest_link(
    hop: np.ndarray, labels: list[int], groups: int, movable: list[bool], both_ends: bool = True
) -> Table:
    """Sec. 3.4: for each group the ends of its fastest link, and half of Gain for each other group."""
    devices = range(len(labels))

    def fastest(d: int) -> float:
        return min((hop[d][e] for e in devices if e != d and labels[e] == labels[d]), default=math.inf)

    gain = [[NO] * groups for _ in devices]
    for own in range(groups):
        ends = [d for d in devices if labels[d] == own and movable[d]]
        least = min((fastest(d) for d in ends), default=math.inf)
        if not both_ends:
            ends = [d for d in ends if fastest(d) == least][:1]
        for d in ends:
            for other in range(groups):
                members = [e for e in devices if labels[e] == other]
                if other != own and fastest(d) == least:
                    mean = sum(hop[d][e] for e in members) / max(len(members), 1)
                    gain[d][other] = mean - (0.0 if math.isinf(least) else least)
    return gain


def slow_kernighan_lin(weight: np.ndarray, labels: list[int], groups: int, movable: list[bool]) -> Table:
    devices = range(len(labels))
    gain = [[NO] * groups for _ in devices]
    for d in devices:
        for other in range(groups):
            if movable[d] and other != labels[d]:
                towards = sum(weight[d][e] for e in devices if labels[e] == other)
                gain[d][other] = towards - sum(weight[d][e] for e in devices if e != d and labels[e] == labels[d])
    return gain


def slow_cyclic(labels: list[int], groups: int, gain_of, last_ring: bool = True) -> list[int]:
    """Rings of moves, each closed at its best place; of all rings the best prefix."""
    movable, visited = [True] * len(labels), set()
    states, sums = [list(labels)], [0.0]
    for _ in range(groups):
        now, moves = list(states[-1]), []
        gain = gain_of(now, movable)
        home = here = now[max(range(len(now)), key=lambda d: max(gain[d]))]
        while True:
            choices = [(d, g) for d in range(len(now)) if now[d] == here for g in range(groups) if gain[d][g] > NO]
            if not choices:
                break
            device, target = max(choices, key=lambda c: gain[c[0]][c[1]])
            moves.append((device, target, gain[device][target], 0.0 if here == home else gain[device][home]))
            now[device], movable[device] = target, False
            visited.add(target)
            here = target
            if here == home:
                break
            gain = gain_of(now, movable)
        if not moves:
            break
        values = [sum(move[2] for move in moves[:k]) + moves[k][3] for k in range(len(moves))]
        last = values.index(max(values))
        closed = list(states[-1])
        if values[last] > 0:
            for device, target, _, _ in moves[:last]:
                closed[device] = target
            closed[moves[last][0]] = home
        states.append(closed)
        sums.append(sums[-1] + max(values[last], 0.0))
        if len(visited) == groups:
            break
    counted = sums if last_ring else sums[: max(1, len(sums) - 1)]
    return states[sums.index(max(counted))]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 3))
def test_gains_are_those_written_out(seed: int, groups: int, size: int) -> None:
    hop, sync, labels = links(seed, groups * size), links(seed + 1, groups * size), some_labels(seed, groups, size)
    labels[0] = (labels[0] + 1) % groups  # in the middle of a ring sizes differ
    movable = np.random.default_rng(seed).random(groups * size) < 0.7
    for both_ends in (True, False):
        got = fastest_link_gain(hop, groups, both_ends=both_ends)(labels, movable)
        slow = slow_fastest_link(hop, labels.tolist(), groups, movable.tolist(), both_ends)
        np.testing.assert_allclose(got, slow)
    got = kernighan_lin_gain(hop, sync, groups)(labels, movable)
    np.testing.assert_allclose(got, slow_kernighan_lin(hop - sync, labels.tolist(), groups, movable.tolist()))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([1, 2, 4]))
def test_circular_search_is_that_written_out(seed: int, groups: int, size: int) -> None:
    hop, sync, labels = links(seed, groups * size), links(seed + 1, groups * size), some_labels(seed, groups, size)
    # Tables of one and the same gain function: what is compared is the rings.
    gains = (
        fastest_link_gain(hop, groups),
        fastest_link_gain(hop, groups, both_ends=False),
        kernighan_lin_gain(hop, sync, groups),
    )
    for gain, last_ring in itertools.product(gains, (True, False)):
        found = cyclic_search(labels, groups, gain, last_ring=last_ring)
        expected = slow_cyclic(
            labels.tolist(), groups, lambda now, free, g=gain: g(np.array(now), np.array(free)).tolist(), last_ring
        )
        assert found.tolist() == expected
        assert np.bincount(found, minlength=groups).tolist() == [size] * groups


def test_the_fastest_link_leaves_its_group() -> None:
    """Two pairs of neighbours, 1 apart, 9 from each other: one of each pair ends up in each group."""
    hop = np.full((4, 4), 9.0)
    hop[0, 1] = hop[1, 0] = hop[2, 3] = hop[3, 2] = 1.0
    found = cyclic_search(np.array([0, 0, 1, 1]), 2, fastest_link_gain(hop, 2))
    assert found[0] != found[1] and found[2] != found[3]


def test_crossover_takes_points_and_repairs_in_order() -> None:
    first, second = np.array([1, 1, 0, 0, 2, 2]), np.array([0, 0, 1, 1, 2, 2])
    assert crossover(first, second, 3, np.array([0])).tolist() == [0, 0, 1, 1, 2, 2]
    assert crossover(first, second, 3, np.array([0, 1])).tolist() == [0, 0, 1, 1, 2, 2]
    assert crossover(first, second, 3, np.array([0, 2])).tolist() == [1, 0, 0, 1, 2, 2]


def test_who_leaves_the_population() -> None:
    costs = np.array([3.0, 9.0, 5.0, 7.0])
    assert [worst_of_all(costs, 0, 2, child) for child in (8.0, 9.0, 9.5)] == [1, None, None]
    assert [worse_parent(costs, 2, 3, child) for child in (4.0, 5.0, 6.0)] == [3, 3, None]
    assert [worse_parent(costs, 3, 2, child) for child in (6.0, 7.0, 8.0)] == [3, 3, None]
    assert worse_parent(costs, 2, 2, 5.0) == 2, "a child that costs as much as its parents takes a place"


@pytest.mark.long
def test_the_codes_rules_leave_a_plateau_that_the_texts_do_not() -> None:
    """Case 2 in small: four machines of three devices and twelve single ones, where most groupings cost the same."""
    site = np.concatenate((np.repeat(np.arange(4), 3), np.arange(4, 16)))
    bandwidth = np.where(site[:, None] == site, 100.0, 1.25) * 1e9 / 8
    task = PlacementTask(stages=6, replicas=4, activation_bytes=0.47e9, parameter_bytes=0.65e9)
    problem = from_matrices(task, np.zeros_like(bandwidth), bandwidth)
    text = min(dtfm_genetic(problem, seed=seed, population=20, trials=300).total_s for seed in range(2))
    code = max(dtfm_genetic_code(problem, seed=seed, population=20, trials=300).total_s for seed in range(2))
    assert code < 0.9 * text


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_labels_and_groups_are_the_same_thing(seed: int, groups: int, size: int) -> None:
    labels = some_labels(seed, groups, size)
    assert labels_of(groups_of(labels, groups)).tolist() == labels.tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.sampled_from([0, 2]))
def test_no_search_beats_brute_force(seed: int, shape: tuple[int, int], sites: int) -> None:
    problem, latency, bandwidth = random_problem(seed, *shape, sites=sites)
    devices = tuple(range(shape[0] * shape[1]))
    best = min(literal_cost_s(problem, latency, bandwidth, g) for g in all_groupings(devices, shape[1]))
    for other in (dtfm_genetic, dtfm_genetic_code, dtfm_kl):
        assert other(problem, seed=seed, population=4, trials=10).total_s >= best - 1e-9
    assert random_groups(problem, seed=seed, draws=5).total_s >= best - 1e-9


@pytest.mark.parametrize("name", represented_by(sorted(PLACEMENTS), "dtfm-kl", "random"))
def test_a_seed_finds_the_same_again(name: str) -> None:
    problem, _, _ = random_problem(11, 3, 3, sites=3)
    found, again = PLACEMENTS[name](problem, 4), PLACEMENTS[name](problem, 4)
    assert found.devices.tolist() == again.devices.tolist()
    assert found.total_s == again.total_s
    assert evaluate(problem, found.devices).total_s == pytest.approx(found.total_s)
