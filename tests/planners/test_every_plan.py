"""Small problems are settled: the array search equals every plan tried one by one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, problem_of, random_graph

from isthmus.cost import Problem, build_replicas, layouts_of
from isthmus.errors import FleetTooSmall
from isthmus.fleet import resolve_fleet
from isthmus.planners import plan
from isthmus.planners.auto import auto
from isthmus.planners.blocks import Blocks
from isthmus.planners.bounds import pooled_bound_s
from isthmus.planners.joint import Descent, every_plan
from isthmus.planners.narrowing import MOST_DEVICES
from isthmus.planners.network import network_of
from isthmus.planners.replica_bound import replicas_bound_s
from isthmus.verify import verify

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "auto"))

from brute import best_step_s, question_of  # pyright: ignore[reportMissingImports]
from cases import large_case, small_case  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize("seed", range(16))
def test_auto_equals_brute_force_on_small_fleets(seed: int) -> None:
    problem = small_case(seed)
    best_s = best_step_s(problem)
    try:
        found = auto(problem)
    except FleetTooSmall:
        assert best_s == float("inf")
        return
    assert found.predicted.step_s == pytest.approx(best_s, rel=1e-8)
    assert found.certificate is not None and found.certificate.gap == 0
    assert verify(found, question_of(problem)).holds


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(2, 5), st.sampled_from([1, 2, 3, 5]))
def test_odd_graphs_are_settled_and_bounds_are_below(seed: int, devices: int, operators: int, count: int) -> None:
    """Skips, shared parameters, frozen ones, integers; memory that binds; every link its own."""
    source = random.Random(seed)
    memory = [source.randint(150, 3000) for _ in range(devices)] if seed % 2 else None
    fleet = fleet_of([source.uniform(5, 50) for _ in range(devices)], seed, memory=memory)
    schedule = source.choice(["gpipe", "1f1b"])
    problem = problem_of(random_graph(seed, operators), fleet, micro_batches=count, schedule=schedule)
    best_s = best_step_s(problem)
    network, blocks = network_of(problem), Blocks(problem)
    settled = every_plan(problem, network, blocks, float("inf"))
    assert settled is not None
    if best_s == float("inf"):
        assert settled.plan is None
        return
    assert settled.plan is not None
    assert settled.step_s == pytest.approx(best_s, rel=1e-8)
    assert settled.plan.predicted.step_s == pytest.approx(best_s, rel=1e-8)
    gradient_bytes = float(sum(v.gradient_bytes for v in blocks.variables))
    bounds = pooled_bound_s(network, blocks, count), replicas_bound_s(network, blocks, count, gradient_bytes)
    assert 0 < min(bounds) <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", (1, 4, 13, 25, 34))
def test_a_descent_only_improves_and_says_what_the_closed_form_says(seed: int) -> None:
    problem = large_case(seed)
    start = plan("chain", problem)
    descent = Descent(problem, network_of(problem), Blocks(problem), 4_000)
    found = descent.run(layouts_of(start), start.predicted.step_s)
    if found is not None:
        assert build_replicas(problem, found, planner="auto").predicted.step_s < start.predicted.step_s


def test_a_large_fleet_is_narrowed_and_the_bound_is_over_all() -> None:
    problem = Problem(
        flow=small_case(0).flow, fleet=resolve_fleet("random:1000:0"), micro_batch_size=2, micro_batches=8
    )
    for name in ("auto", "chain"):
        found = plan(name, problem)
        assert found.certificate is not None and found.certificate.lower_bound > 0
        assert len(found.notes) == 1000
    told = [note for note in auto(problem).notes if "was not looked at" in note]
    assert len(told) == 1000 - MOST_DEVICES
