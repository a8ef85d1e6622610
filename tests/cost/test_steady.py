"""The steady step is the simulator's, and no pipeline undercuts its least step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from tests.planners.plan_cases import fleet_of, problem_of, random_graph

from isthmus.cost import Problem, build_plan
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table
from isthmus.cost.network import network_of
from isthmus.cost.pipelines import Trials, stage_tasks
from isthmus.cost.steady import StageTasks, least_step_s, steady_step_s
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
    problem, plan, tasks = drawn(seed)
    assert tasks.held[0].tolist() == list(plan.replicas[0].schedule.in_flight)
    step_s = steady_step_s(tasks, 0, problem.micro_batches)
    assert step_s == pytest.approx(float(np.mean(list(simulated_s(problem, plan)))), rel=1e-9), plan.replicas[0]
    assert least_step_s(tasks, problem.micro_batches)[0] <= step_s * (1 + 1e-9)


def test_of_many_pipelines_half_take_their_least_step() -> None:
    cases = [drawn(seed) for seed in range(CASES)]
    steps = [steady_step_s(tasks, 0, problem.micro_batches) for problem, _, tasks in cases]
    least = [float(least_step_s(tasks, problem.micro_batches)[0]) for problem, _, tasks in cases]
    ratios = np.array(steps) / np.array(least)
    assert np.median(ratios) < 1.01 and ratios.max() > 1.01
