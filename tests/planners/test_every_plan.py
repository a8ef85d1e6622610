"""Small problems are settled: the array search equals every plan tried one by one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, problem_of, random_graph, saving
from tests.tiers import represented_by

from isthmus.cost import Problem, build_replicas, layouts_of
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import network_of
from isthmus.errors import FleetTooSmall
from isthmus.fleet import resolve_fleet
from isthmus.planners import plan
from isthmus.planners.search import prune_fleet
from isthmus.planners.search.auto import auto
from isthmus.planners.search.descent import Descent
from isthmus.planners.search.exhaustive import exhaustive_plan
from isthmus.verification import verify

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "auto"))

from brute import best_step_s, question_of  # pyright: ignore[reportMissingImports]
from cases import large_case, small_case  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize(
    "seed", [0, 2, 3, pytest.param(4, marks=pytest.mark.long), *range(5, 9), 10, 12, 13, 15, 22, 23]
)  # others take brute force longer
def test_auto_equals_brute_force_on_small_fleets(seed: int) -> None:
    problem = small_case(seed)
    best_s = best_step_s(problem)
    try:
        found = auto(problem)
    except FleetTooSmall:
        assert best_s == float("inf")
        return
    assert found.predicted.step_s == pytest.approx(best_s, rel=1e-8)
    assert verify(found, question_of(problem)).holds()


def odd_problem(seed: int, devices: int, operators: int, count: int, saved: int) -> Problem:
    """Skips, shared parameters, frozen ones, integers; memory that binds; every link its own."""
    source = random.Random(seed)
    memory = [source.randint(150, 3000) for _ in range(devices)] if seed % 2 else None
    fleet = fleet_of([source.uniform(5, 50) for _ in range(devices)], seed, memory=memory)
    schedule = source.choice(["gpipe", "1f1b"])
    graph = saving(random_graph(seed, operators), saved)
    return problem_of(graph, fleet, micro_batches=count, schedule=schedule, recompute=seed % 3 > 0)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(2, 4), st.integers(2, 5), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 9])
)
def test_odd_graphs_are_settled(seed: int, devices: int, operators: int, count: int, saved: int) -> None:
    problem = odd_problem(seed, devices, operators, count, saved)
    best_s = best_step_s(problem)
    network, blocks = network_of(problem), Blocks(problem)
    settled = exhaustive_plan(problem, network, blocks, float("inf"))
    assert settled is not None
    if best_s == float("inf"):
        assert not settled
        return
    assert settled[0].predicted.step_s == pytest.approx(best_s, rel=1e-8)


def test_in_some_of_these_stages_recompute() -> None:
    found = set[bool]()
    for seed in range(1, 60, 2):
        problem = odd_problem(seed, 3, 4, 5, 9)
        settled = exhaustive_plan(problem, network_of(problem), Blocks(problem), float("inf"))
        for made in settled or ():
            found |= {stage.recompute for replica in made.replicas for stage in replica.stages}
    assert found == {True, False}


@pytest.mark.parametrize("seed", represented_by((1, 4, 13, 25, 34), 4, 13, 25))
def test_a_descent_only_improves_and_says_what_the_closed_form_says(seed: int) -> None:
    problem = large_case(seed)
    start = plan("chain", problem)
    descent = Descent(problem, network_of(problem), Blocks(problem), 4_000)
    found = descent.run(layouts_of(start), start.predicted.step_s)
    if found is not None:
        assert build_replicas(problem, found[1], planner="auto").predicted.step_s < start.predicted.step_s


def test_a_large_fleet_is_narrowed_and_the_bound_is_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 16  # fewer than by default, which takes long
    monkeypatch.setattr(prune_fleet, "MOST_DEVICES", most)
    problem = Problem(flow=small_case(0).flow, fleet=resolve_fleet("random:100:0"), micro_batch_size=2, micro_batches=8)
    made = {name: plan(name, problem) for name in ("auto", "chain")}
    for found in made.values():
        assert len(found.notes) == 100
    told = [note for note in made["auto"].notes if "was not looked at" in note]
    assert len(told) == 100 - most
