"""Which stages recompute: the choice for given cuts against all choices, and what they cost and keep."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, operator, parameter, placeholder, problem_of, random_graph, saving, tensor

from isthmus.cost import PlanLayout, Problem, build_plan, build_replicas, place
from isthmus.errors import FleetTooSmall, UserError
from isthmus.graph import OpGraph, Ref, cuts
from isthmus.plans import Plan


def random_layout(seed: int, stages: int, schedule: str) -> tuple[Problem, tuple[str, ...], list[int]]:
    """Memory for one to six micro-batches per stage as it is cut."""
    rng = random.Random(seed)
    graph = saving(random_graph(seed, 7), rng.choice([3, 12, 60]))
    count = rng.choice([1, 2, 5, 24])
    roomy = problem_of(graph, fleet_of([rng.choice([1, 2, 5]) for _ in range(stages)], seed), micro_batches=count)
    boundaries = sorted(rng.sample([cut.position for cut in cuts(roomy.flow)], stages - 1))
    sizes = place(roomy, roomy.fleet.names, boundaries).sizes
    memory = [int(size.memory(1).total + rng.uniform(-0.1, 5) * size.kept(False)) + 1 for size in sizes]
    fleet = fleet_of([d.flops_per_s for d in roomy.fleet.devices], seed, memory=memory)
    return problem_of(graph, fleet, micro_batches=count, schedule=schedule), fleet.names, boundaries


def built(problem: Problem, order: tuple[str, ...], boundaries: list[int], *recompute: bool) -> Plan | None:
    try:
        return build_plan(problem, order, boundaries, planner="hand", recompute=recompute or None)
    except FleetTooSmall:
        return None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from(["1f1b", "1f1b", "gpipe"]))
def test_the_choice_is_the_best_of_all(seed: int, stages: int, schedule: str) -> None:
    problem, order, boundaries = random_layout(seed, stages, schedule)
    chosen = built(problem, order, boundaries)
    all_of_them = [built(problem, order, boundaries, *r) for r in itertools.product((False, True), repeat=stages)]
    fitting = [plan for plan in all_of_them if plan is not None]
    assert (chosen is None) == (not fitting)
    if chosen is None:
        return
    best_s = min(plan.predicted.step_s for plan in fitting)
    assert chosen.predicted.step_s == pytest.approx(best_s, rel=1e-9)
    # Nobody recomputes for nothing.
    fewest = min(
        sum(stage.recompute for stage in plan.stages)
        for plan in fitting
        if plan.predicted.step_s <= best_s * (1 + 1e-9)
    )
    assert sum(stage.recompute for stage in chosen.stages) == fewest


def test_the_choices_above_differ() -> None:
    made = [built(*random_layout(seed, 4, schedule)) for seed in range(60) for schedule in ("1f1b", "gpipe")]
    counts = {sum(stage.recompute for stage in plan.stages) for plan in made if plan is not None}
    assert {0, 1, 2, 3} <= counts


def column_graph() -> OpGraph:
    """x -> a -> b -> loss(labels): the first and the last stage read a column of 8 and of 4 bytes a sample."""
    ops = (
        placeholder("x", 2, dtype="float32"),
        placeholder("labels", 1, dtype="int32"),
        parameter("w", 5),
        operator("a", "x", "w", flops=10, saved=100, width=3),
        operator("b", "a", flops=20, saved=200, width=4),
        operator("loss", "b", "labels", flops=30, saved=300, outputs=(tensor(batched=False),)),
    )
    return OpGraph(name="columns", mode="train", ops=ops, loss=Ref("loss"))


def test_a_stage_that_recomputes_keeps_what_it_received_and_read_and_computes_its_forward_twice() -> None:
    problem = problem_of(column_graph(), fleet_of([1.0] * 3), micro_batches=4, schedule="gpipe")
    made = build_plan(problem, problem.fleet.names, [1, 2], planner="hand", recompute=[True] * 3)
    assert [s.memory.activations for s in made.stages] == [4 * 2 * 8, 4 * 2 * 12, 4 * 2 * (16 + 4)]
    assert [s.memory.recomputed for s in made.stages] == [200, 400, 600]
    assert [(s.flops_forward, s.flops_backward) for s in made.stages] == [(20, 60), (40, 120), (60, 180)]
    kept = build_plan(problem, problem.fleet.names, [1, 2], planner="hand")
    assert [s.memory.activations for s in kept.stages] == [4 * 200, 4 * (24 + 400), 4 * (32 + 600)]
    assert [(s.memory.recomputed, s.flops_backward) for s in kept.stages] == [(0, 40), (0, 80), (0, 120)]
    assert made.predicted.fill_s == pytest.approx(kept.predicted.fill_s + 120)


def test_replicas_choose_each_for_itself() -> None:
    graph = column_graph()
    whole = problem_of(graph, fleet_of([1.0]))
    need = place(whole, ["d0"], []).sizes[0]
    rooms = [need.memory(2).total, need.memory(2, recompute=True).total]
    problem = problem_of(graph, fleet_of([1.0, 1.0], memory=rooms), micro_batches=4, schedule="gpipe")
    made = build_replicas(problem, [PlanLayout(("d0",), (), 2), PlanLayout(("d1",), (), 2)], planner="hand")
    assert [replica.stages[0].recompute for replica in made.replicas] == [False, True]
    assert made.predicted.step_s - made.predicted.sync_s == pytest.approx(2 * 4 * 120)


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ([True], r"recompute: got 1 entries, expected 2, one per stage"),
        ([False, True], r"recompute of stage 1: got true, expected false: the problem forbids it"),
    ],
)
def test_a_wrong_choice_is_refused(recompute: list[bool], message: str) -> None:
    problem = problem_of(column_graph(), fleet_of([1.0, 1.0]), recompute=len(recompute) == 1)
    with pytest.raises(UserError, match=message):
        build_plan(problem, ["d0", "d1"], [1], planner="hand", recompute=recompute)
