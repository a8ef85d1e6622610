from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from importlib.metadata import EntryPoint

import msgspec
import pytest
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph

from isthmus.cost import Problem, build_replicas, layouts_of
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Link, Links
from isthmus.planners import describe, plan, planner_names
from isthmus.planners.baselines.even import even
from isthmus.plans import Plan


def backwards(problem: Problem) -> Plan:
    """The fleet's order, whatever it costs."""
    return even(problem)


def broken(problem: Problem) -> Plan:
    raise ZeroDivisionError("no devices")


def refusing(problem: Problem) -> Plan:
    raise FleetTooSmall("not here")


def wordy(problem: Problem) -> str:
    return "a plan"


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {name: f"{__name__}:{name}" for name in ("backwards", "broken", "refusing", "wordy")}
    targets = {**here, "missing": "no_such_module:plan", "number": "math:pi"}
    entries = [EntryPoint(name, target, "isthmus.planners") for name, target in targets.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [e for e in entries if e.group == group])


def some_problem() -> Problem:
    return problem_of(random_graph(2, 4), fleet_of([1.0, 2.0]))


def test_ours_are_listed_and_described() -> None:
    assert {"chain", "even"} <= set(planner_names())
    assert describe("even") == "Stages of equal operator count, each cut moved to the nearest place where one is legal."


def test_an_unknown_planner_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match="unknown planner 'chian': did you mean 'chain'"):
        plan("chian", some_problem())
    with pytest.raises(UserError, match="unknown planner"):
        describe("chian")


def test_a_planner_of_the_users_own_is_named_by_its_module() -> None:
    assert plan(f"{__name__}:backwards", some_problem()) == plan("even", some_problem())
    assert describe(f"{__name__}:backwards") == "The fleet's order, whatever it costs."
    with pytest.raises(UserError, match="cannot import no_such_module"):
        plan("no_such_module:plan", some_problem())
    with pytest.raises(UserError, match=r"got a float, expected a function"):
        plan("math:pi", some_problem())


@pytest.mark.usefixtures("third_party")
def test_another_package_may_register_a_planner() -> None:
    assert "backwards" in planner_names()
    assert describe("backwards") == "The fleet's order, whatever it costs."
    assert plan("backwards", some_problem()).planner == "even"


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "planner 'broken' failed: ZeroDivisionError"),
        ("wordy", "planner 'wordy': got a str, expected a Plan"),
        ("missing", "cannot be loaded: No module named 'no_such_module'"),
        ("number", "got a float, expected a function"),
    ],
)
def test_a_faulty_planner_is_the_users_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(name, some_problem())


@pytest.mark.usefixtures("third_party")
def test_a_planners_own_refusal_is_kept() -> None:
    with pytest.raises(FleetTooSmall, match="not here"):
        plan("refusing", some_problem())


def test_auto_says_which_schedule_it_chose_and_cuts_are_moved_where_weight_gradients_are_apart() -> None:
    slow = msgspec.structs.replace(fleet_of([2e5, 3e5, 4e5], 3), links=Links(default=Link(0.3, 1e5)))
    problem = problem_of(gpt_graph(2, width=16), slow, micro_batches=2)
    whole, apart = plan("chain", problem), replace(problem, schedule="zero-bubble")
    again = build_replicas(apart, [layout._replace(recompute=None) for layout in layouts_of(whole)], planner="hand")
    chosen = plan("chain", replace(problem, schedule="auto"))
    assert chosen.predicted.step_s < again.predicted.step_s < whole.predicted.step_s
    assert (chosen.planner, chosen.replica.schedule.name) == ("chain", "zero-bubble")
    assert chosen.notes[-1].startswith("schedule auto: 1f1b takes ")
    assert chosen.predicted == plan("chain", apart).predicted
