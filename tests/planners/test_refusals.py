"""Whatever does not fit is refused by every planner with what is short, and by how many bytes."""

from __future__ import annotations

import re

import pytest
from plan_cases import fleet_of, operator, parameter, placeholder, problem_of, random_graph, tensor
from tests.tiers import represented_by

from isthmus.errors import FleetTooSmall
from isthmus.graph import OpGraph, Ref
from isthmus.planners import plan, planner_names
from isthmus.plans import Constraints

OURS = [name for name in planner_names() if not name.startswith("test")]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("memory", represented_by([40, 90], 40))
def test_too_small_a_fleet_is_refused_with_a_device_and_the_bytes(name: str, memory: int) -> None:
    problem = problem_of(random_graph(7, 6), fleet_of([1.0, 2.0, 3.0, 4.0], 1, memory=[memory] * 4))
    with pytest.raises(FleetTooSmall, match=r"device d\d.* offers \d+ B: [\d.]+ \w+ short") as refused:
        plan(name, problem)
    short = re.search(r"([\d.]+) \w+ short", str(refused.value))
    assert short is not None and int(short[1]) > 0


@pytest.mark.parametrize("name", ["even", "equal-compute", "dtfm-genetic", "dtfm-genetic-code", "random"])
def test_a_planner_that_misses_what_fits_says_where(name: str) -> None:
    """One device holds nearly all, the other one operator: stages of about equal size fit nowhere."""
    ops = [placeholder("x", 1)]
    for k in range(4):
        ops += [parameter(f"w{k}", 100), operator(f"op{k}", f"op{k - 1}" if k else "x", f"w{k}", flops=10)]
    ops.append(operator("loss", "op3", flops=1, outputs=(tensor(batched=False),)))
    graph = OpGraph(name="heavy", mode="train", ops=tuple(ops), loss=Ref("loss"))
    fleet = fleet_of([1.0, 1.0], 1, memory=[900, 2600])
    fitting = plan("chain", problem_of(graph, fleet))
    assert len(fitting.stages) == 2
    with pytest.raises(FleetTooSmall, match=r"device d\d .*offers \d.*: [\d.]+ \w+ short"):
        plan(name, problem_of(graph, fleet))


def test_a_model_that_fits_but_for_the_terms_names_the_term() -> None:
    graph = random_graph(3, 5)
    whole = plan("chain", problem_of(graph, fleet_of([1.0]))).stages[0].memory.total
    fleet = fleet_of([1.0, 1.0], 2, memory=[whole * 2, 60])
    plan("chain", problem_of(graph, fleet))
    for labels_stay, field in ((False, "data_holder"), (True, "labels_stay")):
        constraints = Constraints(data_holders=("d1",), labels_stay=labels_stay)
        for name in ("auto", "chain"):
            words = rf"device d1 \(the data_holder.*short.*binds is plan\.{field}"
            with pytest.raises(FleetTooSmall, match=words):
                plan(name, problem_of(graph, fleet, constraints=constraints))
