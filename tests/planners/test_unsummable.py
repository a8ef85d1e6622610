"""Models whose parameters replicas cannot sum: every planner knows, and nothing with several replicas is built."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from plan_cases import fleet_of, problem_of, random_graph
from test_verify import check, question_of
from tests.tiers import represented_by

from isthmus.cost import PlanLayout, Problem, build_replicas
from isthmus.errors import UserError
from isthmus.fleet import Link, Links
from isthmus.graph import Flow, OpGraph
from isthmus.planners import plan, planner_names
from isthmus.verification import verify


def widened(graph: OpGraph, dtype: str) -> OpGraph:
    ops = [
        msgspec.structs.replace(op, outputs=(msgspec.structs.replace(op.outputs[0], dtype=dtype),))
        if op.kind == "parameter"
        else op
        for op in graph.ops
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops))


def problem(dtype: str) -> Problem:
    """Fast links and equal devices: two replicas pay."""
    fleet = msgspec.structs.replace(fleet_of([10.0, 10.0]), links=Links(default=Link(0.0, 1e9)))
    asked = problem_of(random_graph(5, 6), fleet)
    return replace(asked, flow=Flow(widened(asked.flow.graph, dtype)))


@pytest.mark.parametrize("dtype", represented_by(["float64", "complex64", "complex128"], "float64"))
def test_no_planner_makes_several_replicas(dtype: str) -> None:
    asked = problem(dtype)
    for name in sorted({*planner_names()} - {"sky-optimal"}):
        made = plan(name, asked)
        assert len(made.replicas) == 1, name
        check(made, asked)
    two = [PlanLayout(("d0",), (), 2), PlanLayout(("d1",), (), 2)]
    with pytest.raises(UserError, match=rf"got 2 replicas, expected one: parameter 'module\..*' is {dtype}"):
        build_replicas(asked, two, planner="hand")


def test_a_device_that_another_replica_could_use_is_left_out_for_the_type() -> None:
    asked = problem("float64")
    asked = replace(asked, fleet=msgspec.structs.replace(asked.fleet, links=Links(default=Link(10.0, 1.0))))
    (left,) = [note for note in plan("auto", asked).notes if "left out" in note]
    assert "several replicas are not possible: parameter 'module." in left and "is float64" in left


def test_what_has_a_float32_master_is_summed() -> None:
    assert len(plan("auto", problem("float32")).replicas) == 2
    assert problem("bfloat16").most_replicas == 2


def test_the_independent_check_knows() -> None:
    two = build_replicas(problem("float32"), [PlanLayout(("d0",), (), 2), PlanLayout(("d1",), (), 2)], planner="hand")
    fields = {d.field for d in verify(two, question_of(problem("float64"))).differences}
    assert "replicas" in fields
