"""Whole replicas on sets of devices: the best set is that of brute force, and `auto` is no worse."""

from __future__ import annotations

import itertools

import pytest
from plan_cases import fleet_of, problem_of, random_graph

from isthmus.cost import PlanLayout, Problem, build_replicas
from isthmus.fleet import Fleet, Link, Links
from isthmus.planners import plan
from isthmus.planners.search.replicas import replicas_per_device


def alike(speeds: list[float], seed: int) -> Problem:
    fleet = fleet_of(speeds, seed)
    links = Links(default=Link(0.01, 500.0))
    return problem_of(random_graph(seed, 5), Fleet(name="near", devices=fleet.devices, links=links), micro_batches=5)


def every_split(total: int, parts: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, total))) for cut in cuts]


@pytest.mark.parametrize("seed", range(4))
def test_the_best_set_is_that_of_brute_force(seed: int) -> None:
    problem = alike([10.0 + 7 * (seed * k % 5) for k in range(4)], seed)
    steps = [
        build_replicas(
            problem, [PlanLayout((n,), (), m) for n, m in zip(names, shares, strict=True)], planner="hand"
        ).predicted.step_s
        for size in (2, 3, 4)
        for names in itertools.combinations(problem.fleet.names, size)
        for shares in every_split(problem.micro_batches, size)
    ]
    found = min(made.predicted.step_s for made in replicas_per_device(problem))
    assert found == pytest.approx(min(steps), rel=1e-9)


@pytest.mark.long
def test_auto_is_no_worse_on_a_fleet_that_it_does_not_settle() -> None:
    problem = alike([10.0, 20.0, 30.0, 10.0, 20.0, 30.0, 25.0, 15.0], 3)
    found = min(made.predicted.step_s for made in replicas_per_device(problem))
    assert plan("auto", problem).predicted.step_s <= found * (1 + 1e-9)
