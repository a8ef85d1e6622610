"""Compression in the plan document, in its cost and in its price."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isthmus.cost import PlanLayout, Problem, build_replicas, step_price, with_edges
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Region
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec
from isthmus.plans import Compression, Plan, load_plan, save_plan

GB = 10**9
VALUE = TensorSpec("float32", (Affine(1), 2), (2, 1))


def operator(name: str, *args: str) -> Op:
    return Op(
        name=name,
        kind="operator",
        target="aten.test.default",
        args=tuple(Ref(a) for a in args),
        outputs=(VALUE,),
        requires_grad=(True,),
        flops_forward=Affine(100),
        flops_backward=Affine(200),
        saved_bytes=Affine(8),
    )


def problem(*, micro_batches: int = 6, memory: int = 1 << 20) -> Problem:
    weights = tuple(
        Op(
            name=f"w{n}",
            kind="parameter",
            target=f"w{n}",
            outputs=(TensorSpec("float32", (10,), (1,)),),
            requires_grad=(True,),
        )
        for n in "abc"
    )
    x = Op(name="x", kind="placeholder", target="x", outputs=(VALUE,), requires_grad=(False,))
    chain = (operator("a", "x", "wa"), operator("b", "a", "wb"), operator("c", "b", "wc"))
    graph = OpGraph(name="three", mode="train", loss=Ref("c"), ops=(x, *weights, *chain))
    devices = tuple(Device(name=n, region=f"at-{n}", flops_per_s=100.0, memory_bytes=memory) for n in "pqrs")
    sites = tuple(Region(region=f"at-{n}", egress_price_per_gb=1.0) for n in "pqrs")
    fleet = Fleet(name="four", devices=devices, links=Links(default=Link(0.5, 1.0)), region_info=sites)
    return Problem(flow=Flow(graph), fleet=fleet, micro_batch_size=1, micro_batches=micro_batches)


def two_replicas(asked: Problem) -> Plan:
    return build_replicas(asked, [PlanLayout(("p", "q"), (1,), 4), PlanLayout(("r", "s"), (2,), 2)], planner="hand")


def packed(made: Plan, asked: Problem, wire_bytes: int) -> Plan:
    """The activations of the first replica take so many bytes."""
    how = Compression(codec="topk", ratio=10.0, wire_bytes=wire_bytes)
    edges = [list(replica.edges) for replica in made.replicas]
    edges[0][0] = msgspec.structs.replace(edges[0][0], forward_compression=how)
    return with_edges(asked, made, edges)


@pytest.mark.parametrize("memory", [1 << 20, 130, 142])
def test_the_same_edges_give_the_same_plan(memory: int) -> None:
    asked = problem(memory=memory)
    layouts = [PlanLayout(("p", "q", "r"), (1, 2), 6)]
    made = build_replicas(asked, layouts, planner="hand")
    assert with_edges(asked, made, [r.edges for r in made.replicas]) == made
    both = two_replicas(problem())
    assert with_edges(problem(), both, [r.edges for r in both.replicas]) == both


def test_a_shorter_message_makes_a_shorter_step() -> None:
    asked = problem()
    dense = two_replicas(asked)
    # 4 micro-batches; 8 bytes at 1 byte/s are the period both ways, and 3 + 6 s of compute come on top
    assert dense.predicted.step_s - dense.predicted.sync_s == pytest.approx(9 + 2 * 8.5 + 3 * 8)
    short = packed(dense, asked, 2)
    # the gradients still take 8 s each
    assert short.predicted.step_s - short.predicted.sync_s == pytest.approx(9 + 2.5 + 8.5 + 3 * 8)
    assert short.predicted.bottleneck == "link q -> p"
    assert short.predicted.sync_s == dense.predicted.sync_s
    assert short.replicas[1] == dense.replicas[1]


def test_a_shorter_period_wants_more_micro_batches_in_flight() -> None:
    asked = problem(micro_batches=40)
    made = build_replicas(asked, [PlanLayout(("p", "q"), (1,), 40)], planner="hand")
    tiny = Compression(codec="topk", wire_bytes=0)
    edge = msgspec.structs.replace(made.replica.edges[0], forward_compression=tiny, backward_compression=tiny)
    dense_limits, found = made.replica.schedule.in_flight, with_edges(asked, made, [(edge,)])
    assert found.predicted.period_s == pytest.approx(6.0)
    assert found.replica.schedule.in_flight != dense_limits
    for stage, before, k, was in zip(
        found.stages, made.stages, found.replica.schedule.in_flight, dense_limits, strict=True
    ):
        assert stage.memory.activations * was == before.memory.activations * k
        assert stage.memory.total - stage.memory.activations == before.memory.total - before.memory.activations


def test_a_plan_of_another_problem_is_refused() -> None:
    made = two_replicas(problem())
    with pytest.raises(UserError, match="micro_batches: got 6, the problem has 7"):
        with_edges(problem(micro_batches=7), made, [r.edges for r in made.replicas])


def test_bytes_on_the_wire_are_paid_for_each_replica_with_its_share() -> None:
    asked = problem()
    dense = two_replicas(asked)
    # Two members send twice the buffer in sum, each of the other's site.
    sums = 2 * sum(group.size_bytes for group in dense.sync.groups)
    assert sums and step_price(dense, asked.fleet, step_s=0.0).egress == pytest.approx(((4 + 2) * 2 * 8 + sums) / GB)
    short = packed(dense, asked, 2)
    saved = 4 * 6
    expected = ((4 + 2) * 2 * 8 - saved + sums) / GB
    assert step_price(short, asked.fleet, step_s=0.0).egress == pytest.approx(expected)


def test_the_document_keeps_it_and_says_nothing_where_there_is_none(tmp_path: Path) -> None:
    asked, path = problem(), tmp_path / "plan.json"
    dense = two_replicas(asked)
    save_plan(dense, path)
    assert "compression" not in path.read_text()
    short = packed(dense, asked, 2)
    save_plan(short, path)
    assert load_plan(path) == short
    path.write_text(path.read_text().replace('"ratio": 10.0', '"ratio": 0.1'))
    with pytest.raises(UserError, match=r"ratio: got 0\.1"):
        load_plan(path)
