"""Where memory decides what a replica can take, and which stage of a device that runs two recomputes."""

from __future__ import annotations

import itertools

import pytest
from plan_cases import operator, parameter, placeholder, tensor
from tests.tiers import represented_by

from isthmus.cost import PlanLayout, Problem, SyncPolicy, build_plan, build_replicas
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, OpGraph, Ref
from isthmus.planners import plan
from isthmus.plans import Constraints

ONE_STAGE = OpGraph(
    name="one",
    mode="train",
    loss=Ref("loss"),
    ops=(
        placeholder("x", 25, dtype="float32"),
        parameter("w", 1),
        operator("a", "x", "w", flops=100, saved=100),
        operator("loss", "a", outputs=(tensor(batched=False),)),
    ),
)
TWO_ENDS = OpGraph(
    name="ends",
    mode="train",
    loss=Ref("loss"),
    ops=(
        placeholder("x", 1, dtype="float32"),
        placeholder("labels", 1),
        parameter("w", 1),
        operator("a", "x", "w", flops=1, saved=100),
        operator("m", "a", flops=500, saved=5),
        operator("loss", "m", "labels", flops=100, saved=100, outputs=(tensor(batched=False),)),
    ),
)


def gpipe(capacities: list[int], micro_batches: int, **more: object) -> Problem:
    devices = tuple(
        Device(name=f"d{i}", region="here", flops_per_s=100.0, memory_bytes=100 * count + 60)
        for i, count in enumerate(capacities)
    )
    fleet = Fleet(name="f", devices=devices, links=Links(default=Link(0.001, 1e6)))
    return Problem(
        flow=Flow(ONE_STAGE),
        fleet=fleet,
        micro_batch_size=1,
        micro_batches=micro_batches,
        schedule="gpipe",
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("recompute", represented_by([True, False], False))
def test_replicas_take_what_they_hold_beyond_what_is_settled(recompute: bool) -> None:
    problem = gpipe([16, 2, 2, 2, 1, 1, 3], 12, recompute=recompute)
    shares = [2, 2, 2, 2, 1, 1, 2]
    by_hand = build_replicas(problem, [PlanLayout((f"d{i}",), (), m) for i, m in enumerate(shares)], planner="hand")
    assert plan("auto", problem).predicted.step_s <= by_hand.predicted.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "more", [{}, {"constraints": Constraints(data_holders=("d0", "d1"))}, {"sync": SyncPolicy(mode="local", period=2)}]
)
def test_terms_and_policies_do_not_blind_it(more: dict[str, object]) -> None:
    problem = gpipe([39, 1], 4, **more)
    by_hand = build_replicas(problem, [PlanLayout(("d0",), (), 3), PlanLayout(("d1",), (), 1)], planner="hand")
    assert plan("auto", problem).predicted.step_s <= by_hand.predicted.step_s * (1 + 1e-9)


@pytest.mark.parametrize("planner", ["auto", "chain"])
def test_of_two_stages_on_a_device_the_right_one_recomputes(planner: str) -> None:
    fleet = Fleet(
        name="u",
        links=Links(default=Link(0.001, 1e6)),
        devices=(
            Device(name="d0", region="home", flops_per_s=100.0, memory_bytes=1200),
            Device(name="d1", region="cloud", flops_per_s=1000.0, memory_bytes=1 << 30),
        ),
    )
    problem = Problem(
        flow=Flow(TWO_ENDS),
        fleet=fleet,
        micro_batch_size=2,
        micro_batches=4,
        schedule="gpipe",
        constraints=Constraints(data_holders=("d0",), labels_stay=True),
    )
    made = plan(planner, problem)
    order, boundaries = [s.device for s in made.stages], made.boundaries()
    assert order == ["d0", "d1", "d0"]
    each: list[float] = []
    for chosen in itertools.product((False, True), repeat=3):
        try:
            each.append(build_plan(problem, order, boundaries, planner="hand", recompute=chosen).predicted.step_s)
        except FleetTooSmall:
            continue
    assert made.predicted.step_s == pytest.approx(min(each), rel=1e-12)


def test_a_refusal_says_that_recomputing_would_fit() -> None:
    refusals = [(_refusal(memory, True), _refusal(memory, False)) for memory in range(1, 30)]
    only_then = [kept for again, kept in refusals if again is None and kept is not None]
    assert only_then, "some memory must do only with recomputing"
    assert all("what binds is plan.recompute = false" in kept for kept in only_then)
    assert not any("plan.recompute" in kept for again, kept in refusals if again is not None and kept is not None)


def _refusal(capacity: int, recompute: bool) -> str | None:
    """The refusal, if any, of a model with a wide middle on one device."""
    graph = OpGraph(
        name="wide",
        mode="train",
        loss=Ref("loss"),
        ops=(
            placeholder("x", 1, dtype="float32"),
            parameter("w", 1),
            operator("a", "x", "w", flops=100, saved=100),
            operator("loss", "a", outputs=(tensor(batched=False),)),
        ),
    )
    device = Device(name="d0", region="here", flops_per_s=100.0, memory_bytes=100 * capacity + 60)
    fleet = Fleet(name="f", devices=(device,), links=Links(default=Link(0.001, 1e6)))
    problem = Problem(
        flow=Flow(graph), fleet=fleet, micro_batch_size=1, micro_batches=12, schedule="gpipe", recompute=recompute
    )
    try:
        plan("chain", problem)
    except FleetTooSmall as refusal:
        return str(refusal)
    return None
