"""Plans of several replicas: what they share, what they average, and what that takes."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.cost import PlanLayout, Problem, build_plan, build_replicas
from isthmus.cost.sync import fastest, sum_time, sync_s
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Region, Route
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec
from isthmus.plans import Collective, ReplicaSync, SyncGroup

LINK = Link(latency_s=0.5, bandwidth_bytes_per_s=100.0)


def weight(name: str, count: int) -> Op:
    spec = TensorSpec("float32", (count,), (1,))
    return Op(name=name, kind="parameter", target=name, outputs=(spec,), requires_grad=(True,))


def operator(name: str, *args: str) -> Op:
    return Op(
        name=name,
        kind="operator",
        target="aten.test.default",
        args=tuple(Ref(a) for a in args),
        outputs=(TensorSpec("float32", (Affine(1), 2), (2, 1)),),
        requires_grad=(True,),
        flops_forward=Affine(100),
        flops_backward=Affine(200),
        saved_bytes=Affine(8),
    )


def problem(micro_batches: int = 6) -> Problem:
    graph = OpGraph(
        name="three",
        mode="train",
        loss=Ref("c"),
        ops=(
            Op(
                name="x",
                kind="placeholder",
                target="x",
                outputs=(TensorSpec("float32", (Affine(1), 2), (2, 1)),),
                requires_grad=(False,),
            ),
            weight("wa", 10),
            weight("wb", 20),
            weight("wc", 30),
            operator("a", "x", "wa"),
            operator("b", "a", "wb"),
            operator("c", "b", "wc"),
        ),
    )
    devices = tuple(Device(name=n, region="here", flops_per_s=100.0, memory_bytes=1 << 20) for n in "pqrstu")
    fleet = Fleet(name="six", devices=devices, links=Links(default=LINK))
    return Problem(flow=Flow(graph), fleet=fleet, micro_batch_size=1, micro_batches=micro_batches)


def test_one_replica_is_the_plan_that_it_was() -> None:
    single = build_plan(problem(), ["p", "q"], [1], planner="hand")
    assert single == build_replicas(problem(), [PlanLayout(("p", "q"), (1,), 6)], planner="hand")
    assert single.sync == ReplicaSync()
    assert single.predicted.sync_s == 0


def test_replicas_cut_alike_average_stage_by_stage() -> None:
    plan = build_replicas(problem(), [PlanLayout(("p", "q"), (1,), 3), PlanLayout(("r", "s"), (1,), 3)], planner="hand")
    # wa has 10 elements, wb and wc 50; beside them travels a number for each of them, and the count.
    assert plan.sync == ReplicaSync(
        groups=(
            SyncGroup(devices=("p", "r"), parameters=("wa",), size_bytes=48),
            SyncGroup(devices=("q", "s"), parameters=("wb", "wc"), size_bytes=212),
        )
    )
    # Each of the two sends half there and, summed, half back, at 0.5 s + 100 bytes/s: at most 27 of 53 elements.
    assert plan.predicted.sync_s == pytest.approx(2 * (0.5 + 1.08))
    alone = build_plan(problem(3), ["p", "q"], [1], planner="hand").predicted
    assert plan.predicted.step_s == pytest.approx(alone.step_s + plan.predicted.sync_s)
    assert [r.micro_batches for r in plan.replicas] == [3, 3]


def test_replicas_cut_differently_average_what_they_have_in_common() -> None:
    plan = build_replicas(problem(), [PlanLayout(("p", "q"), (1,), 4), PlanLayout(("r", "s"), (2,), 2)], planner="hand")
    assert {g.devices: g.size_bytes for g in plan.sync.groups} == {("p", "r"): 48, ("q", "r"): 88, ("q", "s"): 128}
    # The groups have no link in common: the largest takes longest.
    assert plan.predicted.sync_s == pytest.approx(2 * (0.5 + 0.64))
    slower = build_plan(problem(4), ["p", "q"], [1], planner="hand").predicted
    assert plan.predicted.step_s == pytest.approx(slower.step_s + plan.predicted.sync_s)


def test_a_group_takes_the_fastest_collective() -> None:
    fleet, group = problem().fleet, SyncGroup(devices=("p", "q", "r", "s"), size_bytes=400)
    ring = Collective(kind="ring", islands=((0, 1, 2, 3),))
    assert sum_time(fleet, group).alone_s == pytest.approx(2 * (0.5 + 1.0))
    assert sum_time(fleet, msgspec.structs.replace(group, collective=ring)).alone_s == pytest.approx(
        2 * 3 * (0.5 + 1.0)
    )
    assert fastest(fleet, group) == group


def test_islands_with_slow_links_between_them_sum_inside_first() -> None:
    devices = tuple(
        Device(name=n, region=r, flops_per_s=1.0, memory_bytes=1) for n, r in zip("pqrs", "aabb", strict=True)
    )
    links = Links(default=Link(0.01, 1e3), intra=Link(1e-4, 1e9))
    # Two of each site: shards cross the slow links four times over a site's uplink, the leaders' only once.
    sites = tuple(Region(region=r, uplink_bytes_per_s=1e3) for r in "ab")
    fleet = Fleet(name="two", devices=devices, links=links, region_info=sites)
    group = fastest(fleet, SyncGroup(devices=("p", "q", "r", "s"), size_bytes=4000))
    assert group.collective == Collective(kind="hierarchical", islands=((0, 1), (2, 3)))
    assert sum_time(fleet, group).alone_s == pytest.approx(2 * (0.01 + 2.0), rel=1e-2)


def test_a_slow_link_is_left_out_of_a_ring() -> None:
    slow = Route(source="a", target="b", link=Link(0.0, 1.0))
    devices = tuple(Device(name=n, region=f"at {n}", flops_per_s=1.0, memory_bytes=1) for n in "abcd")
    fleet = Fleet(name="four", devices=devices, links=Links(default=Link(0.0, 100.0), devices=(slow,)))
    group = fastest(fleet, SyncGroup(devices=tuple("abcd"), size_bytes=400))
    assert group.collective.kind == "ring"
    (order,) = group.collective.islands
    assert (0, 1) not in zip(order, (*order[1:], order[0]), strict=True)
    assert sum_time(fleet, group).alone_s == pytest.approx(6.0)


def test_a_link_carries_what_all_groups_send_over_it() -> None:
    fleet = problem().fleet
    groups = tuple(SyncGroup(devices=("p", "q"), size_bytes=400, iterations=(k, 2)) for k in (0, 1))
    # Both in step 2: 2 x 400 bytes over each link, latency once; alone two rounds of half of it.
    expected = (2 * (2 * (0.5 + 2.0)) + 8.0 + 0.5) / 3
    assert sync_s(fleet, ReplicaSync(period=3, groups=groups)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "layouts, words",
    [
        ([PlanLayout(("p",), (), 3), PlanLayout(("p",), (), 3)], "device 'p' in 2 replicas"),
        ([PlanLayout(("p",), (), 3), PlanLayout(("q",), (), 4)], r"\[3, 4\] micro-batches, expected 6"),
        ([PlanLayout(("p",), (), 6), PlanLayout(("q",), (), 0)], r"\[6, 0\] micro-batches"),
    ],
)
def test_layouts_that_do_not_fit_together(layouts: list[PlanLayout], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_replicas(problem(), layouts, planner="hand")


def test_a_plan_of_two_replicas_has_no_stages_of_its_own() -> None:
    plan = build_replicas(problem(), [PlanLayout(("p",), (), 3), PlanLayout(("q",), (), 3)], planner="hand")
    assert plan.devices == ("p", "q")
    with pytest.raises(UserError, match="replicas: got 2, expected exactly 1"):
        _ = plan.stages
