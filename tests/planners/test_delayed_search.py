"""Planning for `delayed`: the search minimises what the cost model predicts of steps that overlap, which no step of
`1f1b` is."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from plan_cases import all_orders_of, fleet_of, problem_of, random_graph

from isthmus.api.make_plan import stated_steps, step_in_simulation
from isthmus.cost import Problem, build_plan
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table, every_cut
from isthmus.cost.network import network_of
from isthmus.cost.pipelines import Trials, timed
from isthmus.errors import FleetTooSmall
from isthmus.fleet import with_memory
from isthmus.planners import plan as plan_by
from isthmus.planners.search.one_pipeline import chain
from isthmus.plans import Plan
from isthmus.simulator import SimulationOptions


def drawn(seed: int, most_devices: int = 3) -> Problem:
    source = random.Random(seed)
    devices = source.randint(2, most_devices)
    memory = [source.randint(500, 4000) for _ in range(devices)]
    fleet = fleet_of([source.uniform(1, 5) for _ in range(devices)], seed, memory=memory)
    graph = random_graph(seed, source.randint(devices + 1, 6))
    return problem_of(graph, fleet, micro_batches=source.choice((2, 4, 8)), schedule="delayed")


def every_pipeline(problem: Problem) -> Iterator[Plan]:
    blocks = Blocks(problem)
    for order in all_orders_of(problem.fleet):
        for cut in itertools.combinations(range(1, blocks.count), len(order) - 1):
            try:
                yield build_plan(problem, order, blocks.boundaries(cut), planner="hand")
            except FleetTooSmall:
                continue


def fitting(start: int, count: int) -> list[int]:
    return [seed for seed in range(start, start + 4 * count) if any(every_pipeline(drawn(seed)))][:count]


@pytest.mark.parametrize("seed", fitting(0, 12))
def test_no_pipeline_of_a_small_problem_has_a_shorter_predicted_step(seed: int) -> None:
    problem = drawn(seed)
    best_s = min(plan.predicted.step_s for plan in every_pipeline(problem))
    assert chain(problem).predicted.step_s == pytest.approx(best_s, rel=1e-8)


@pytest.mark.parametrize("seed", fitting(100, 12))
def test_a_row_of_the_arrays_is_what_a_plan_predicts(seed: int) -> None:
    problem = drawn(seed)
    network, blocks, devices = network_of(problem), Blocks(problem), len(problem.fleet.names)
    ends = every_cut(blocks, devices)
    trials = Trials(cut_table(blocks, ends), np.arange(len(ends)), np.tile(np.arange(devices), (len(ends), 1)))
    for again in (False, True):
        rows = timed(problem, network, trials, np.full(trials.order.shape, again))
        steps_s = rows.step_s(problem.micro_batches)
        for row, step_s in zip(ends, steps_s.tolist(), strict=True):
            boundaries = blocks.boundaries(row[1:-1].tolist())
            try:
                made = build_plan(
                    problem, problem.fleet.names, boundaries, planner="hand", recompute=[again] * devices
                ).predicted.step_s
            except FleetTooSmall:
                made = float("inf")
            assert step_s == pytest.approx(made, rel=1e-9)
        for time_s in np.geomspace(1, 1e4, 25):
            counts = rows.counts(np.arange(len(ends)), np.full(len(ends), time_s), 50)
            for k in rows.fitting():
                in_time = [m for m in range(1, 51) if rows.at_most_s(m)[k] <= time_s * (1 + 1e-12)]
                assert counts[k] == max(in_time, default=0)


@pytest.mark.parametrize("seed", fitting(200, 6))
def test_more_memory_makes_no_slower_plan(seed: int) -> None:
    """The search once minimised a step of `1f1b`: a plan took 580 ms, and with half the memory 483."""
    problem = drawn(seed)
    twice = with_memory(problem.fleet, {d.name: 2 * d.memory_bytes for d in problem.fleet.devices})
    roomy = dataclasses.replace(problem, fleet=twice)
    assert chain(roomy).predicted.step_s <= chain(problem).predicted.step_s * (1 + 1e-9)


@pytest.mark.parametrize("planner", ["chain", "auto"])
def test_a_scorer_chooses_among_plans_with_and_without_a_short_step_alone(planner: str) -> None:
    """Steps hinder each other where two terms of the formula are about as long, so it cannot choose."""
    problem = drawn(7, 4)

    def score(plan: Plan) -> float:
        return step_in_simulation(plan, problem.fleet, stated_steps(plan), SimulationOptions())

    assert score(plan_by(planner, problem, score)) <= score(plan_by(planner, problem)) * (1 + 1e-9)
