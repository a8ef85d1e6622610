"""What `isthmus graph` says of a model, and the throughput that `plan` says."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from isthmus.cost import Problem, build_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec
from isthmus.report import plan_summary, plan_table
from isthmus.report.graph_table import graph_table, graph_weights


def graph() -> OpGraph:
    value = TensorSpec("float32", (Affine(1), 2), (2, 1))
    x = Op(name="x", kind="placeholder", target="x", outputs=(value,), requires_grad=(False,))
    w = Op(name="w", kind="parameter", target="w", outputs=(TensorSpec("float32", (10,), (1,)),), requires_grad=(True,))

    def op(name: str, layer: str, *args: str) -> Op:
        return Op(
            name=name,
            kind="operator",
            target="aten.mul.Tensor",
            args=tuple(Ref(a) for a in args),
            outputs=(value,),
            requires_grad=(True,),
            flops_forward=Affine(100),
            flops_backward=Affine(200),
            saved_bytes=Affine(8),
            module=layer,
        )

    ops = (x, w, op("a", "one", "x", "w"), op("b", "one", "a", "w"), op("c", "two", "b"))
    return OpGraph(name="small", mode="train", loss=Ref("c"), ops=ops)


def text(shown: object) -> str:
    into = StringIO()
    Console(file=into, width=200).print(shown)
    return into.getvalue()


def test_layers_and_operators_weigh_what_the_graph_says() -> None:
    weights = graph_weights(Flow(graph()), 3)
    assert [(w.name, w.operators, w.flops_forward, w.flops_backward) for w in weights.layers] == [
        ("one", 2, 600, 1200),
        ("two", 1, 300, 600),
    ]
    assert [w.parameter_bytes for w in weights.operators] == [40, 0, 0]  # counted once
    assert [(w.saved_bytes, w.output_bytes) for w in weights.layers] == [(48, 48), (24, 24)]
    assert "aten.mul.Tensor" in text(graph_table(weights, operators=True))
    assert text(graph_table(weights, operators=False)).splitlines()[-2].split()[0] == "all"


@pytest.mark.parametrize("recompute", [False, True])
def test_throughput_is_the_batch_over_the_step(recompute: bool) -> None:
    devices = tuple(Device(name=n, region="r", flops_per_s=100.0, memory_bytes=1 << 20) for n in "pq")
    fleet = Fleet(name="two", devices=devices, links=Links(default=Link(0.5, 10.0)))
    problem = Problem(flow=Flow(graph()), fleet=fleet, micro_batch_size=2, micro_batches=4)
    plan = build_plan(problem, ("p", "q"), (2,), planner="hand", recompute=(recompute, False))
    told = plan_summary(plan, fleet)
    assert told.samples_per_s == pytest.approx(8 / plan.predicted.step_s)
    assert told.eq4_samples_per_s == pytest.approx(8 / plan.predicted.eq3_step_s)
    assert told.flops_per_s == pytest.approx(8 * 3 * 300 / plan.predicted.step_s)
    assert ("F twice" in text(plan_table(plan, fleet))) == recompute
