"""`chain` where memory decides how many micro-batches are in flight: still the best of all plans."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import all_orders_of, fleet_of, problem_of, random_graph, saving
from tests.tiers import represented_by

from isthmus.cost import Problem, build_plan, place
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import network_of
from isthmus.errors import FleetTooSmall
from isthmus.graph import cuts
from isthmus.planners import plan
from isthmus.planners.search.exhaustive import exhaustive_pipeline


def tight_problem(seed: int, operators: int, devices: int, *, saved: int = 1, schedule: str = "1f1b") -> Problem:
    """Devices that hold between half and one and a half of what an even share of the model needs.

    `saved` multiplies what operators save, so that recomputing pays now and then; one problem in four forbids it.
    """
    rng = random.Random(seed)
    graph = saving(random_graph(seed, operators), saved)
    held = 4 if schedule == "gpipe" else rng.choice([1, 2])
    whole = problem_of(graph, fleet_of([1.0], 0, memory=[1 << 40]))
    need = place(whole, ["d0"], []).sizes[0].memory(held)
    kept = need.total - need.working  # what a device needs for its operators at work does not shrink with its share
    memory = [int(kept * rng.uniform(0.5, 1.5) / devices) + need.working + 1 for _ in range(devices)]
    fleet = fleet_of([rng.choice([1, 2, 5]) for _ in range(devices)], seed, memory=memory)
    return problem_of(graph, fleet, schedule=schedule, micro_batches=rng.choice([4, 12]), recompute=seed % 4 > 0)


def best_of_all(problem: Problem) -> float:
    """The least predicted step time of every order, cut and choice of what recomputes; infinite where none fits."""
    positions = [cut.position for cut in cuts(problem.flow)]
    best = float("inf")
    for order in all_orders_of(problem.fleet):
        choices = list(itertools.product((False, True) if problem.recompute else (False,), repeat=len(order)))
        for boundaries in itertools.combinations(positions, len(order) - 1):
            for recompute in choices:
                try:
                    made = build_plan(problem, order, boundaries, planner="hand", recompute=recompute)
                except FleetTooSmall:
                    continue
                best = min(best, made.predicted.step_s)
    return best


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(3, 6),
    st.integers(1, 3),
    st.sampled_from([1, 12, 40]),
    st.sampled_from(["1f1b", "gpipe"]),
)
def test_chain_is_the_best_of_all_plans(seed: int, operators: int, devices: int, saved: int, schedule: str) -> None:
    problem = tight_problem(seed, operators, devices, saved=saved, schedule=schedule)
    best = best_of_all(problem)
    if best == float("inf"):
        with pytest.raises(FleetTooSmall):
            plan("chain", problem)
        return
    made = plan("chain", problem)
    assert made.predicted.step_s == pytest.approx(best)


@pytest.mark.parametrize("schedule", represented_by(["1f1b", "gpipe"], "gpipe"))
def test_in_some_of_these_stages_recompute(schedule: str) -> None:
    found = set[bool]()
    for seed in range(120):
        try:
            made = plan("chain", tight_problem(seed, 5, 3, saved=12, schedule=schedule))
        except FleetTooSmall:
            continue
        found |= {stage.recompute for stage in made.stages}
        assert seed % 4 or not any(stage.recompute for stage in made.stages), "it is forbidden"
    assert found == {True, False}


def test_some_of_these_are_throttled_by_memory() -> None:
    throttled = 0
    for seed in range(40):
        try:
            made = plan("chain", tight_problem(seed, 5, 3))
        except FleetTooSmall:
            continue
        limits = made.replica.schedule.in_flight
        throttled += any(limit < len(limits) - stage for stage, limit in enumerate(limits))
    assert throttled


def test_too_many_to_try_is_said() -> None:
    problem = problem_of(random_graph(1, 40), fleet_of([1.0] * 6, 1))
    assert exhaustive_pipeline(problem, network_of(problem), Blocks(problem), float("inf")) is None
