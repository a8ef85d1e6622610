"""Plans that keep the first stage, and the loss, where the data are: against every plan that does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, gpt_graph, operator, parameter, placeholder, problem_of, random_graph, tensor
from term_cases import asked, every_single, priced_fleet
from test_verify import check, question_of

from isthmus.cost import Problem, broken_constraint, build_plan, place
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Device, Fleet, Link, Links, resolve_fleet
from isthmus.graph import Flow, OpGraph, Ref, assign, partition
from isthmus.graph.cuts import label_columns, last_start
from isthmus.planners import plan, planner_names
from isthmus.planners.registry import check_constraints
from isthmus.plans import Constraints, Plan
from isthmus.verification.reading import GraphReading


def respects(made: Plan, problem: Problem) -> bool:
    return all(
        broken_constraint(problem, [s.device for s in r.stages], [s.first for s in r.stages[1:]]) is None
        for r in made.replicas
    )


@given(
    seed=st.integers(0, 10**6),
    operators=st.integers(2, 5),
    devices=st.integers(1, 4),
    two=st.booleans(),
    labels_stay=st.booleans(),
    tight=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_chain_is_the_best_of_all_that_respect_the_terms(
    seed: int, operators: int, devices: int, two: bool, labels_stay: bool, tight: bool
) -> None:
    memory = [300 + (seed * (k + 7)) % 1500 for k in range(devices)] if tight else None
    fleet = priced_fleet(seed, devices, memory=memory)
    holders = [f"d{seed % devices}", *(["d0"] if two else [])]
    problem = asked(seed, operators, fleet, holders=holders, labels_stay=labels_stay)
    best_s = min((made.predicted.step_s for made in every_single(problem)), default=float("inf"))
    if best_s == float("inf"):
        with pytest.raises(FleetTooSmall, match="short") as refused:
            plan("chain", problem)
        free = min(
            (made.predicted.step_s for made in every_single(replace(problem, constraints=Constraints()))), default=None
        )
        assert free is None or "what binds is plan." in str(refused.value)
        return
    made = plan("chain", problem)
    assert made.predicted.step_s == pytest.approx(best_s)
    assert respects(made, problem)
    check(made, problem)
    for other in ("auto", "even"):
        try:
            found = plan(other, problem)
        except FleetTooSmall:
            assert other == "even"  # which tries one plan only
            continue
        assert respects(found, problem)
        check(found, problem)
        if other == "auto":
            assert found.predicted.step_s <= best_s * (1 + 1e-9)


def test_a_device_at_both_ends_of_one_replica_is_in_no_other() -> None:
    """Moves of single devices would take one of its ends away."""
    problem = asked(982, 2, priced_fleet(982, 4), holders=["d2", "d0"], labels_stay=True)
    check(plan("auto", problem), problem)


@pytest.mark.long
def test_a_slow_holder_keeps_its_ends_and_gives_away_the_middle() -> None:
    devices = tuple(
        Device(name=f"d{i}", region="here", flops_per_s=s, memory_bytes=1 << 40) for i, s in enumerate([1e8, 1e9, 1e9])
    )
    fleet = Fleet(name="near", devices=devices, links=Links(default=Link(1e-3, 1e8)))
    constraints = Constraints(data_holders=("d0",), labels_stay=True)
    problem = problem_of(gpt_graph(2), fleet, micro_batches=8, constraints=constraints)
    made = plan("chain", problem)
    order = [stage.device for stage in made.stages]
    assert order[0] == order[-1] == "d0" and set(order[1:-1]) == {"d1", "d2"}
    assert made.predicted.step_s < build_plan(problem, ["d0"], [], planner="alone").predicted.step_s
    check(made, problem)
    free = plan("chain", problem_of(gpt_graph(2), fleet, micro_batches=8))
    assert free.predicted.step_s <= made.predicted.step_s


def test_two_stages_of_a_device_share_its_time_its_memory_and_its_links() -> None:
    fleet = fleet_of([10.0, 20.0], 5)
    problem = asked(3, 6, fleet, holders=["d0"], labels_stay=True)
    placed = place(problem, ["d0", "d1", "d0"], [2, problem.last_start or 0])
    times = placed.times
    assert times.device_s["d0"] == times.compute_s[0] + times.compute_s[2]
    assert times.bottleneck[0] >= times.device_s["d0"]
    within = [e for e in times.edges if {e.source, e.target} == {0, 2}]
    assert within and all(e.forward_s == e.backward_s == 0 for e in within)
    between = [e for e in times.edges if 1 in (e.source, e.target)]
    out = sum(e.forward_wire_s if e.target == 1 else e.backward_wire_s for e in between)
    assert times.link_s["d0", "d1"] == pytest.approx(out)
    made = build_plan(problem, ["d0", "d1", "d0"], [2, problem.last_start or 0], planner="hand")
    need = sum(made.stages[k].memory.total for k in (0, 2))
    short = fleet_of([10.0, 20.0], 5, memory=[need // 2, 1 << 40])
    with pytest.raises(FleetTooSmall, match=r"stages 0 and 2 on device d0 needs .* short"):
        build_plan(
            asked(3, 6, short, holders=["d0"], labels_stay=True),
            ["d0", "d1", "d0"],
            [2, problem.last_start or 0],
            planner="hand",
        )


def test_labels_are_sent_from_the_first_stage_where_only_it_has_them() -> None:
    graph = random_graph(4, 4)
    alone, held = Flow(graph), Flow(graph, columns_first=True)
    for flow, expected in ((alone, ()), (held, ("labels",))):
        stages = partition(flow, assign(flow, [2]))
        assert tuple(c.value.op for c in stages[1].receives if c.value.op == "labels") == expected
        assert ("labels" in stages[1].columns) == (flow is alone)


def test_labels_meet_no_parameter() -> None:
    graph = OpGraph(
        name="both",
        mode="train",
        loss=Ref("loss"),
        ops=(
            placeholder("x", 4),
            placeholder("y", 1),
            parameter("w", 3),
            operator("early", "y"),
            operator("a", "x", "w"),
            operator("shifted", "early"),
            operator("b", "a", "x"),
            operator("loss", "b", "shifted", outputs=(tensor(batched=False),)),
        ),
    )
    flow = Flow(graph)
    assert label_columns(flow) == ("y",)
    # `early` runs before the first cut, in the first stage; `shifted` must be with the loss.
    assert last_start(flow) == [op.name for op in flow.operators].index("shifted")
    problem = problem_of(graph, fleet_of([1.0, 1.0]), constraints=Constraints(data_holders=("d0",), labels_stay=True))
    from_scratch = GraphReading(question_of(problem)).labels_from
    assert from_scratch == problem.last_start


@given(seed=st.integers(0, 10**6), operators=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_verify_finds_the_same_place_for_labels(seed: int, operators: int) -> None:
    problem = asked(seed, operators, fleet_of([1.0, 2.0]), holders=["d1"], labels_stay=True)
    assert GraphReading(question_of(problem)).labels_from == problem.last_start


def test_a_plan_elsewhere_is_seen() -> None:
    fleet = fleet_of([1.0, 3.0], 5)
    free = build_plan(problem_of(random_graph(3, 5), fleet), ["d1", "d0"], [2], planner="hand")
    pinned = asked(3, 5, fleet, holders=["d0"], labels_stay=True, micro_batches=4)
    claims = build_plan(pinned, ["d0"], [], planner="hand")
    for edited in (free, claims):
        assert respects(edited, pinned) == (edited is claims)
    with pytest.raises(UserError, match=r"data_holder: the first stage reads the data and is on d1, expected d0"):
        build_plan(pinned, ["d1", "d0"], [2], planner="hand")
    with pytest.raises(UserError, match=r"labels_stay: the last stage takes the labels and is on d1, expected d0"):
        build_plan(pinned, ["d0", "d1"], [2], planner="hand")
    with pytest.raises(UserError, match="labels_stay: the last stage starts at"):
        build_plan(pinned, ["d0", "d1", "d0"], [1, (pinned.last_start or 0) + 1], planner="hand") if (
            (pinned.last_start or 0) + 1 < len(pinned.flow.operators)
        ) else place(asked(4, 5, fleet, holders=["d0"], labels_stay=True), ["d0", "d1", "d0"], [1, 99])


def test_planners_that_put_anything_anywhere_say_so() -> None:
    constraints = Constraints(data_holders=("d0",), labels_stay=True)
    for name in set(planner_names()) - {"auto", "chain", "even"}:
        with pytest.raises(UserError, match=rf"plan.labels_stay: planner '{name}' .* 'auto', 'chain' or 'even'"):
            check_constraints(name, constraints)
    with pytest.raises(UserError, match="labels_stay: got true without a data_holder"):
        Constraints(labels_stay=True)
    with pytest.raises(UserError, match="unknown device in data_holder 'd9'"):
        asked(1, 3, fleet_of([1.0]), holders=["d9"])


@pytest.mark.long
def test_a_larger_fleet_begins_where_the_data_are() -> None:
    fleet = resolve_fleet("random:12:5")
    holder = fleet.names[7]
    for labels_stay in (False, True):
        constraints = Constraints(data_holders=(holder,), labels_stay=labels_stay)
        problem = problem_of(gpt_graph(3), fleet, micro_batches=8, constraints=constraints)
        for name in ("chain", "auto"):
            made = plan(name, problem)
            assert respects(made, problem)
            assert made.predicted.step_s <= build_plan(problem, [holder], [], planner="alone").predicted.step_s
            check(made, problem)


def test_a_region_has_several_replicas() -> None:
    fleet = fleet_of([1.0] * 4, 0)
    problem = problem_of(
        random_graph(3, 2), fleet, micro_batches=16, constraints=Constraints(data_holders=("d1", "d3"))
    )
    made = plan("auto", problem)
    assert 1 < len(made.replicas) <= 2
    assert {r.stages[0].device for r in made.replicas} == {"d1", "d3"}
    check(made, problem)
