"""The allocations as planners: what they build, what they certify, and what they refuse."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import all_orders_of, every_cut, fleet_of, gpt_graph, problem_of, random_graph

from isthmus.cost import Problem, place
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.on_fleet import equal_compute, sky_heuristic, sky_optimal
from isthmus.plans import Plan

PLANNERS = {
    "equal-compute": equal_compute,
    "sky-heuristic": sky_heuristic,
    "sky-optimal": sky_optimal,
}

named = pytest.mark.parametrize(("name", "planner"), PLANNERS.items(), ids=PLANNERS)


def random_problem(seed: int, operators: int, devices: int, *, memory: bool) -> Problem:
    rng = random.Random(seed)
    sizes = [rng.randint(300, 5000) for _ in range(devices)] if memory else None
    fleet = fleet_of([rng.uniform(5, 50) for _ in range(devices)], seed, memory=sizes)
    return problem_of(random_graph(seed, operators), fleet, schedule=rng.choice(["gpipe", "1f1b"]))


def attempt(planner: Callable[[Problem], Plan], problem: Problem) -> Plan | None:
    try:
        return planner(problem)
    except FleetTooSmall:
        return None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_optimal_stages_are_bounded_from_below_for_every_plan(
    seed: int, operators: int, devices: int, memory: bool
) -> None:
    problem = random_problem(seed, operators, devices, memory=memory)
    made = attempt(sky_optimal, problem)
    if made is None or made.certificate is None:
        return
    held = int(made.certificate.question.split("memory for ")[1].split()[0])
    for order in all_orders_of(problem.fleet):
        for placed in every_cut(problem, order):
            sizes = [size.memory(held).total for size in placed.sizes]
            if all(s <= problem.fleet.device(n).memory_bytes for s, n in zip(sizes, order, strict=True)):
                assert made.certificate.lower_bound <= placed.times.bottleneck[0] * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4))
def test_the_largest_compute_is_the_least_where_links_are_free(seed: int, operators: int, devices: int) -> None:
    problem = random_problem(seed, operators, devices, memory=False)
    made = sky_optimal(problem)
    computes = [max(p.times.compute_s) for order in all_orders_of(problem.fleet) for p in every_cut(problem, order)]
    order = [s.device for s in made.stages]
    largest = max(place(problem, order, made.boundaries()).times.compute_s)
    assert made.certificate is not None
    assert made.certificate.gap < 2e-4  # HiGHS ends at 1e-4
    assert min(computes) * (1 - 1e-9) <= largest <= max(min(computes), made.certificate.lower_bound) * (1 + 2e-4)


@named
def test_a_plan_names_its_planner_and_its_idle_devices(name: str, planner: Callable[[Problem], Plan]) -> None:
    fleet = fleet_of([40.0, 1e-3, 20.0], 3)
    made = planner(problem_of(gpt_graph(2), fleet))
    assert made.planner == name
    assert planner.__doc__
    assert len(planner.__doc__.splitlines()[0]) < 130
    idle = set(fleet.names) - {s.device for s in made.stages}
    assert {n.split()[0] for n in made.notes if "gave it no layers" in n} == idle
    for stage in made.stages:
        assert stage.memory.total <= fleet.device(stage.device).memory_bytes
    if name == "sky-optimal":
        assert made.certificate is not None
        assert "any order and subset" in made.certificate.question
        assert 0 < made.certificate.lower_bound <= made.predicted.period_s
    else:
        assert made.certificate is None


@named
def test_a_fleet_without_the_memory_is_refused_by_device_and_bytes(
    name: str, planner: Callable[[Problem], Plan]
) -> None:
    problem = problem_of(gpt_graph(1), fleet_of([1.0, 2.0], memory=[1000, 1000]))
    with pytest.raises(FleetTooSmall, match=r"does not fit fleet 'hand'.* device d\d would .* [\d.]+ \w+ short"):
        planner(problem)


def test_a_refusal_says_when_another_planner_would_fit_the_fleet() -> None:
    roomy = problem_of(gpt_graph(2), fleet_of([1.0, 1.0], memory=[1 << 40, 1]))
    with pytest.raises(FleetTooSmall, match=r"sky-heuristic found no allocation .* although there is one"):
        sky_heuristic(roomy)
    assert [s.device for s in sky_optimal(roomy).stages] == ["d0"]


def test_memory_is_kept_for_the_micro_batches_in_flight_where_it_can_be() -> None:
    graph = gpt_graph(2)
    for schedule, held in (("1f1b", 2), ("gpipe", 4)):
        problem = problem_of(graph, fleet_of([1.0, 1.0]), schedule=schedule)
        scope = sky_optimal(problem).certificate
        assert scope is not None
        assert f"memory for {held} micro-batches in flight" in scope.question
    needs = [s.memory.total for s in itertools.chain(sky_optimal(problem_of(graph, fleet_of([1.0, 1.0]))).stages)]
    tight = problem_of(graph, fleet_of([1.0, 1.0], memory=[int(max(needs) * 0.9)] * 2))
    made = sky_optimal(tight)
    assert all(s.memory.total <= max(needs) * 0.9 for s in made.stages)
