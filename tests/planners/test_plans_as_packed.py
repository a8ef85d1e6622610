"""Planners price what will be sent: plans under `[compression]` against every pipeline, packed, tried one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import all_orders_of, fleet_of, problem_of, random_graph
from test_verify import check
from tests.tiers import represented_by

from isthmus.cost import PlanLayout, Problem, build_plan, build_replicas, preference
from isthmus.cost.compression import ratio_planner_names
from isthmus.errors import FleetTooSmall, UserError
from isthmus.graph import cuts
from isthmus.planners import plan, planner_names
from isthmus.plans import CompressionConfig, Constraints, Packing, Plan
from isthmus.protocol import RunSpec
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s

METHODS = [name.replace("int8", "int4/int8") for name in ratio_planner_names()]
"""A codec of gradients stands behind a slash: `int8` alone is planned as `int4` is."""
QUICK = sorted({*planner_names()} - {"auto", "dtfm-genetic", "dtfm-kl", "sky-optimal"})
SLACK = 1 + 1e-9


def asked(seed: int, method: str, *, operators: int = 5, devices: int = 3, ratio: float = 20.0) -> Problem:
    """Slow links, so that messages matter; sometimes memory for few micro-batches, sometimes slow devices."""
    rng = random.Random(seed)
    memory = None if rng.random() < 0.6 else [rng.randint(300, 1500) for _ in range(devices)]
    fleet = fleet_of([rng.choice([3, 30, 300]) * rng.uniform(1, 3) for _ in range(devices)], seed, memory=memory)
    there, _, back = method.partition("/")
    packed = CompressionConfig(method=there, ratio=ratio, backward=back or None)
    constraints = Constraints(compression=packed)
    return problem_of(random_graph(seed, operators), fleet, constraints=constraints)


def every_pipeline_s(problem: Problem) -> float:
    """The least step of every order of every subset, cut everywhere."""
    places = [cut.position for cut in cuts(problem.flow)]
    found = [float("inf")]
    for order in all_orders_of(problem.fleet):
        for boundaries in combinations(places, len(order) - 1):
            try:
                found.append(build_plan(problem, order, boundaries, planner="all").predicted.step_s)
            except FleetTooSmall:
                continue
    return min(found)


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 100_000))
def test_the_exact_planner_finds_the_best_of_all_packed_pipelines(method: str, seed: int) -> None:
    problem = asked(seed, method)
    least_s = every_pipeline_s(problem)
    try:
        made = plan("chain", problem)
    except FleetTooSmall:
        assert least_s == float("inf")
        return
    assert made.predicted.step_s == pytest.approx(least_s, rel=1e-9)
    check(made, problem)


@pytest.mark.parametrize("method", represented_by(METHODS, "just-enough"))
@settings(deadline=None, max_examples=2)
@given(seed=st.integers(0, 100_000))
def test_auto_is_no_slower_than_any_planner(method: str, seed: int) -> None:
    problem = asked(seed, method)
    try:
        best = plan("auto", problem)
    except FleetTooSmall:
        return
    check(best, problem)
    for name in QUICK:
        try:
            other = plan(name, problem)
        except UserError:
            continue
        assert best.predicted.step_s <= other.predicted.step_s * SLACK, name


@pytest.mark.parametrize("method", METHODS)
def test_what_is_planned_is_what_is_built_and_about_what_is_simulated(method: str) -> None:
    problem = asked(7, method, operators=9)
    made = plan("chain", problem)
    again = build_plan(problem, [s.device for s in made.stages], made.boundaries(), planner="again")
    assert again.predicted == made.predicted
    assert again.replica.edges == made.replica.edges
    spec = RunSpec(steps=4, micro_batches=problem.micro_batches, micro_batch_size=problem.micro_batch_size)
    assert steady_step_s(simulate(made, problem.fleet, spec)) == pytest.approx(made.predicted.step_s, rel=0.3)


@pytest.mark.parametrize("method", METHODS)
def test_money_is_counted_for_what_is_sent(method: str) -> None:
    problem = asked(11, method)
    devices = (msgspec.structs.replace(d, price_per_hour=1.0 + n) for n, d in enumerate(problem.fleet.devices))
    fleet = msgspec.structs.replace(problem.fleet, devices=tuple(devices))
    problem = replace(
        problem, fleet=fleet, constraints=Constraints(objective="cost", compression=problem.constraints.compression)
    )
    made = plan("chain", problem)
    prices: list[float] = []
    places = [cut.position for cut in cuts(problem.flow)]
    for order in all_orders_of(problem.fleet):
        for boundaries in combinations(places, len(order) - 1):
            try:
                prices.append(preference(problem, build_plan(problem, order, boundaries, planner="all"))[0])
            except FleetTooSmall:
                continue
    assert preference(problem, made)[0] == pytest.approx(min(prices))


def replicated(problem: Problem) -> Plan:
    names = problem.fleet.names
    place = cuts(problem.flow)[0].position
    return build_replicas(problem, [PlanLayout(names[:2], (place,), 3), PlanLayout(names[2:3], (), 1)], planner="hand")


def test_each_replica_is_a_pipeline_of_its_own() -> None:
    problem = asked(3, "adatopk")
    made = replicated(problem)
    alone = build_plan(
        problem.on(problem.fleet.subset(problem.fleet.names[:2]), 3),
        problem.fleet.names[:2],
        [s.first for s in made.replicas[0].stages[1:]],
        planner="alone",
    )
    assert made.replicas[0].edges == alone.replica.edges


def test_feedback_is_asked_of_gradients_alone() -> None:
    problem = asked(3, "uniform")
    feedback = CompressionConfig(method="uniform", ratio=20.0, feedback=True)
    (edge,) = replicated(replace(problem, constraints=Constraints(compression=feedback))).replicas[0].edges
    assert edge.backward_compression is not None and edge.backward_compression.feedback
    assert edge.forward_compression is not None and not edge.forward_compression.feedback


def test_gradients_may_have_a_codec_of_their_own() -> None:
    (edge,) = replicated(asked(3, "int4/int8")).replicas[0].edges
    assert edge.forward_compression is not None and edge.forward_compression.codec == "int4"
    assert edge.backward_compression is not None and edge.backward_compression.codec == "int8"
    words = "backward: got 'int8' with method 'uniform', expected each of them among bf16, int8, int4"
    with pytest.raises(ValueError, match=words):
        CompressionConfig(method="uniform", backward="int8")


@pytest.mark.parametrize("elements", [1, 2, 7, 100, 257, 5000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64", "int64"])
def test_packing_never_makes_a_tensor_longer(elements: int, dtype: str) -> None:
    for packing in (Packing(codec="int8"), Packing(codec="bf16"), Packing(codec="topk", ratio=1.5)):
        assert packing.saves(elements, dtype) >= 0
    if dtype in ("complex64", "int64"):
        assert Packing(codec="int8").saves(elements, dtype) == 0
