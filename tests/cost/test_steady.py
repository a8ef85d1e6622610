"""The steady step is the simulator's, and no pipeline undercuts its least step."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.planners.plan_cases import fleet_of, problem_of, random_graph

from isthmus.cost import MemoryRoom, Problem, build_plan, in_flight_limits
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table
from isthmus.cost.network import network_of
from isthmus.cost.pipelines import Trials, stage_tasks
from isthmus.cost.steady import StageTasks, least_step_s, steady_step_s
from isthmus.cost.steptime import EdgeTime, PipelineTime
from isthmus.errors import UserError
from isthmus.plans import Plan
from isthmus.protocol import RunSpec
from isthmus.simulator import simulate
from isthmus.trace import step_bounds

CASES = 60


def drawn(seed: int) -> tuple[Problem, Plan, StageTasks]:
    """A pipeline of two to five stages, cut anywhere, on devices and links that differ; half lack memory."""
    source = random.Random(seed)
    while True:
        devices = source.randint(2, 5)
        graph = random_graph(source.randrange(10**6), source.randint(devices, 10))
        memory = [source.randint(600, 3000) for _ in range(devices)] if source.random() < 0.5 else None
        fleet = fleet_of([source.uniform(1, 5) for _ in range(devices)], source.randrange(10**6), memory=memory)
        schedule, count = source.choice(("1f1b", "gpipe")), source.choice((1, 3, 8, 16))
        problem = problem_of(graph, fleet, micro_batches=count, schedule=schedule)
        blocks = Blocks(problem)
        if blocks.count < devices:
            continue
        ends = (0, *sorted(source.sample(range(1, blocks.count), devices - 1)), blocks.count)
        order = source.sample(range(devices), devices)
        names = [fleet.names[d] for d in order]
        again = [problem.recompute and source.random() < 0.2 for _ in order]
        try:
            plan = build_plan(problem, names, blocks.boundaries(ends[1:-1]), planner="drawn", recompute=again)
        except UserError:  # it does not fit
            continue
        trials = Trials(cut_table(blocks, np.array([ends])), np.zeros(1, dtype=np.int64), np.array([order]))
        return problem, plan, stage_tasks(problem, network_of(problem), trials, count, np.array([again]))


def simulated_s(problem: Problem, plan: Plan) -> Iterator[float]:
    """Yield how long steps take, between the ends of one and the next; the first few are not steady."""
    spec = RunSpec(steps=12, micro_batches=problem.micro_batches, micro_batch_size=problem.micro_batch_size)
    ends = [end_s for _, end_s in step_bounds(simulate(plan, problem.fleet, spec)).values()]
    for before, after in itertools.pairwise(ends[4:]):
        yield after - before


@pytest.mark.parametrize("seed", range(CASES))
def test_a_steady_step_is_what_the_simulator_takes(seed: int) -> None:
    problem, plan, most = drawn(seed)
    held = np.array([plan.replicas[0].schedule.in_flight], dtype=np.float64)
    tasks = replace(most, held=held)
    assert (held <= most.held).all() and (problem.schedule == "1f1b" or (held == most.held).all())
    step_s = steady_step_s(tasks, 0, problem.micro_batches)
    assert step_s <= steady_step_s(most, 0, problem.micro_batches) * 1.001
    assert step_s == pytest.approx(float(np.mean(list(simulated_s(problem, plan)))), rel=1e-9), plan.replicas[0]
    assert least_step_s(tasks, problem.micro_batches)[0] <= step_s * (1 + 1e-9)


def test_more_in_flight_than_hide_the_round_trip_make_a_step_shorter() -> None:
    """Gradients that queue up at a first stage that is slow keep the stage behind it without work: backward comes
    first. Of sixteen micro-batches the round trip is hidden by seven."""
    message = EdgeTime(0, 1, 0.13, 0.13, 0.05, 0.05)
    times = PipelineTime(
        devices=("a", "b"), forward_s=(0.022, 0.014), backward_s=(0.047, 0.028), edges=(message,), shared_s=0.0
    )
    roomy, tight = ([MemoryRoom(capacity=most, fixed=0, each=1)] * 2 for most in (99, 9))
    problem = problem_of(random_graph(0, 4), fleet_of([1, 1], 0), micro_batches=16)
    assert math.ceil(times.round_trips_s[0] / times.bottleneck[0]) + 1 == 7
    assert in_flight_limits(problem, times, roomy) == (14, 1)
    assert in_flight_limits(problem, times, tight) == (9, 1)
    assert times.steady_s((7, 1), 16) > 1.2 * times.steady_s((14, 1), 16)
    assert times.steady_s((14, 1), 16) == times.steady_s((16, 1), 16) < 1.02 * 16 * sum((0.022, 0.047))


def test_of_many_pipelines_half_take_their_least_step() -> None:
    cases = [drawn(seed) for seed in range(CASES)]
    steps = [steady_step_s(tasks, 0, problem.micro_batches) for problem, _, tasks in cases]
    least = [float(least_step_s(tasks, problem.micro_batches)[0]) for problem, _, tasks in cases]
    ratios = np.array(steps) / np.array(least)
    assert np.median(ratios) < 1.01 and ratios.max() > 1.01
