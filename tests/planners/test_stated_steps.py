"""The step that a plan states is the simulator's after many steps, where the formula is far off."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from plan_cases import fleet_of, gpt_graph, operator, parameter, placeholder, problem_of, random_graph, tensor

from isthmus.api.make_plan import SIMULATED_STEPS, stated_steps, step_in_simulation
from isthmus.cost import Problem, build_plan, parameter_state
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import OpGraph, Ref
from isthmus.planners import plan as plan_by
from isthmus.plans import Plan
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import step_bounds


def stated_s(problem: Problem, plan: Plan) -> float:
    return step_in_simulation(plan, problem.fleet, stated_steps(plan), SimulationOptions())


def after_many_s(problem: Problem, plan: Plan, steps: int = 30) -> float:
    """The slope of step ends."""
    spec = RunSpec(steps=steps, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)
    ends = [end_s for _, (_, end_s) in sorted(step_bounds(simulate(plan, problem.fleet, spec)).items())]
    return statistics.linear_regression(range(steps // 3, steps - 1), ends[steps // 3 : -1]).slope


def near(speeds: list[float], link: Link, memory: int = 1 << 40) -> Fleet:
    devices = (
        Device(name=f"d{k}", region="here", flops_per_s=speed, memory_bytes=memory) for k, speed in enumerate(speeds)
    )
    return Fleet(name="near", devices=tuple(devices), links=Links(default=link))


def tied_scalars(count: int) -> Problem:
    """Two operators on two devices, 20 ms apart, that share so many numbers."""
    names = [f"tied{k}" for k in range(count)]
    graph = OpGraph(
        name="scalars",
        mode="train",
        loss=Ref("loss"),
        ops=(
            placeholder("x", 4, dtype="float32"),
            *(parameter(name, 1) for name in names),
            operator("a", "x", *names, flops=1000, width=8),
            operator("loss", "a", *names, flops=1000, outputs=(tensor(batched=False),)),
        ),
    )
    return problem_of(graph, near([1e6, 1e6], Link(0.02, 1e6)), micro_batches=8)


def delayed(seed: int) -> tuple[Problem, Plan]:
    """Of which eight steps are up to 3 % off: they settle late, or take turns."""
    source = random.Random(seed)
    count = source.choice((2, 3, 4, 5))
    fleet = fleet_of([source.uniform(5, 50) for _ in range(count)], seed)
    micro_batches = source.choice((1, 2, 4))
    problem = problem_of(random_graph(seed, count + 4), fleet, micro_batches=micro_batches, schedule="delayed")
    return problem, plan_by("chain", problem)


def in_two(count: int) -> tuple[Problem, Plan]:
    problem = tied_scalars(count)
    return problem, build_plan(problem, ["d0", "d1"], [1], planner="hand")


def tied_model() -> tuple[Problem, Plan]:
    problem = problem_of(gpt_graph(2), near([4e8, 4e8], Link(0.02, 5e7)), micro_batches=8)
    return problem, build_plan(problem, ["d0", "d1"], [40], planner="hand")


def four_devices() -> tuple[Problem, Plan]:
    problem = problem_of(gpt_graph(4), near([4e8, 2e8, 3e8, 4e8], Link(0.01, 5e7)), micro_batches=8)
    return problem, plan_by("chain", problem)


def memory_tight() -> tuple[Problem, Plan]:
    fleet = near([4e8 + 1e7 * k for k in range(12)], Link(0.01, 1e8), memory=1_500_000)
    problem = problem_of(gpt_graph(6), fleet, micro_batches=16, state=parameter_state("adamw"))
    return problem, plan_by("even", problem)


def slow_first_stage() -> tuple[Problem, Plan]:
    problem = problem_of(gpt_graph(3, tied=False), near([1e8, 8e8], Link(0.02, 5e7)), micro_batches=8)
    return problem, build_plan(problem, ["d0", "d1"], [70], planner="hand")


TABLE: dict[str, Callable[[], tuple[Problem, Plan]]] = {
    **{f"{count} tied scalars": partial(in_two, count) for count in (0, 1, 2, 4, 8)},
    "a tied model": tied_model,
    "four devices": four_devices,
    "memory that binds": memory_tight,
    "a slow first stage": slow_first_stage,
}


@pytest.mark.parametrize("row", TABLE)
def test_what_a_plan_states_is_the_step_after_many(row: str) -> None:
    problem, plan = TABLE[row]()
    many_s = after_many_s(problem, plan)
    assert stated_s(problem, plan) == pytest.approx(many_s, rel=0.001)
    if row != "0 tied scalars":
        assert plan.predicted.step_s > 1.03 * many_s


def test_parameters_that_travel_at_once_take_no_longer_than_one() -> None:
    steps = {count: stated_s(*in_two(count)) for count in (0, 1, 8)}
    assert steps[8] < 1.001 * steps[0] and in_two(8)[1].predicted.step_s > 4 * steps[8]


@pytest.mark.parametrize("seed", [75, 93, 220])
def test_a_delayed_plan_states_its_step_though_steps_settle_late_or_take_turns(seed: int) -> None:
    problem, plan = delayed(seed)
    many_s = after_many_s(problem, plan, 200)
    assert stated_s(problem, plan) == pytest.approx(many_s, rel=0.002)
    few_s = step_in_simulation(plan, problem.fleet, SIMULATED_STEPS, SimulationOptions())
    assert few_s != pytest.approx(many_s, rel=0.02)


def test_a_delayed_plan_of_hours_a_step_is_simulated_for_as_long_as_others() -> None:
    plan = delayed(75)[1]
    slow = msgspec.structs.replace(plan.predicted, step_s=3600.0)
    assert stated_steps(plan) > SIMULATED_STEPS == stated_steps(msgspec.structs.replace(plan, predicted=slow))
