"""Plans of several replicas: what they share, what they average, and what that takes."""

from __future__ import annotations

import pytest

from isthmus.cost import Layout, Problem, build_plan, build_replicas
from isthmus.cost.sync import ring_s, sharded_s, sync_s
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec
from isthmus.plan import SyncGroup

LINK = Link(latency_s=0.5, bandwidth_bytes_per_s=100.0)


def weight(name: str, count: int) -> Op:
    spec = TensorSpec("float32", (count,), (1,))
    return Op(name=name, kind="parameter", target=name, outputs=(spec,), requires_grad=(True,))


def operator(name: str, *args: str) -> Op:
    return Op(
        name=name, kind="operator", target="aten.test.default", args=tuple(Ref(a) for a in args),
        outputs=(TensorSpec("float32", (Affine(1), 2), (2, 1)),), requires_grad=(True,),
        flops_forward=Affine(100), flops_backward=Affine(200), saved_bytes=Affine(8),
    )  # fmt: skip


def problem(micro_batches: int = 6) -> Problem:
    graph = OpGraph(
        name="three", mode="train", loss=Ref("c"),
        ops=(
            Op(name="x", kind="placeholder", target="x", outputs=(TensorSpec("float32", (Affine(1), 2), (2, 1)),),
               requires_grad=(False,)),
            weight("wa", 10), weight("wb", 20), weight("wc", 30),
            operator("a", "x", "wa"), operator("b", "a", "wb"), operator("c", "b", "wc"),
        ),
    )  # fmt: skip
    devices = tuple(Device(name=n, region="here", flops_per_s=100.0, memory_bytes=1 << 20) for n in "pqrstu")
    fleet = Fleet(name="six", devices=devices, links=Links(default=LINK))
    return Problem(flow=Flow(graph), fleet=fleet, micro_batch_size=1, micro_batches=micro_batches)


def test_one_replica_is_the_plan_that_it_was() -> None:
    single = build_plan(problem(), ["p", "q"], [1], planner="hand")
    assert single == build_replicas(problem(), [Layout(("p", "q"), (1,), 6)], planner="hand")
    assert single.sync == ()
    assert single.predicted.sync_s == 0


def test_replicas_cut_alike_average_stage_by_stage() -> None:
    plan = build_replicas(problem(), [Layout(("p", "q"), (1,), 3), Layout(("r", "s"), (1,), 3)], planner="hand")
    assert plan.sync == (
        SyncGroup(devices=("p", "r"), size_bytes=40), SyncGroup(devices=("q", "s"), size_bytes=200)
    )  # fmt: skip
    # Two members: each sends half there and half back, both ways at 0.5 s + 100 bytes at 100 bytes/s.
    assert plan.predicted.sync_s == pytest.approx(2 * (0.5 + 1.0))
    alone = build_plan(problem(3), ["p", "q"], [1], planner="hand").predicted
    assert plan.predicted.step_s == pytest.approx(alone.step_s + plan.predicted.sync_s)
    assert [r.micro_batches for r in plan.replicas] == [3, 3]


def test_replicas_cut_differently_average_what_they_have_in_common() -> None:
    plan = build_replicas(problem(), [Layout(("p", "q"), (1,), 4), Layout(("r", "s"), (2,), 2)], planner="hand")
    assert {g.devices: g.size_bytes for g in plan.sync} == {("p", "r"): 40, ("q", "r"): 80, ("q", "s"): 120}
    # q averages wb with r and then wc with s.
    assert plan.predicted.sync_s == pytest.approx(2 * (0.5 + 0.4) + 2 * (0.5 + 0.6))
    slower = build_plan(problem(4), ["p", "q"], [1], planner="hand").predicted
    assert plan.predicted.step_s == pytest.approx(slower.step_s + plan.predicted.sync_s)


def test_a_group_takes_the_faster_of_shards_and_ring() -> None:
    fleet, group = problem().fleet, SyncGroup(devices=("p", "q", "r", "s"), size_bytes=400)
    assert sharded_s(fleet, group, "p") == pytest.approx(2 * 3 * (0.5 + 1.0))
    assert ring_s(fleet, group) == pytest.approx(2 * 3 * (0.5 + 1.0))
    assert sync_s(fleet, [group]) == pytest.approx(9.0)


@pytest.mark.parametrize("layouts, words", [
    ([Layout(("p",), (), 3), Layout(("p",), (), 3)], "device 'p' in 2 replicas"),
    ([Layout(("p",), (), 3), Layout(("q",), (), 4)], r"\[3, 4\] micro-batches, expected 6"),
    ([Layout(("p",), (), 6), Layout(("q",), (), 0)], r"\[6, 0\] micro-batches"),
])  # fmt: skip
def test_layouts_that_do_not_fit_together(layouts: list[Layout], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_replicas(problem(), layouts, planner="hand")


def test_a_plan_of_two_replicas_has_no_stages_of_its_own() -> None:
    plan = build_replicas(problem(), [Layout(("p",), (), 3), Layout(("q",), (), 3)], planner="hand")
    assert plan.devices == ("p", "q")
    with pytest.raises(UserError, match="replicas: got 2, expected exactly 1"):
        _ = plan.stages
