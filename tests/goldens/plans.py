"""Cost of fifty planning problems: ten graphs on ten fleets, each by five planners."""

from __future__ import annotations

import random

import msgspec

from isthmus.cost import Problem
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Link, Links
from isthmus.planners import plan
from tests.planners.plan_cases import fleet_of, gpt_graph, problem_of, random_graph, saving

PLANNERS = ("auto", "chain", "even", "op-fence", "sky-heuristic")
CASES = range(10)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds per step; no step where the fleet is too small."""

    step_s: float | None = None


def problem(case: int) -> Problem:
    """Small transformers and random graphs, on three to five unequal devices; some are short of memory."""
    draw, count = random.Random(case), 3 + case % 3
    schedule = "gpipe" if case % 3 == 2 else "1f1b"
    if case % 5 == 0:
        fleet = fleet_of([draw.uniform(2e9, 20e9) for _ in range(count)], case)
        near = Links(default=Link(0.002 * (1 + case), 2e7))
        return problem_of(gpt_graph(2), msgspec.structs.replace(fleet, links=near), micro_batches=4, schedule=schedule)
    graph = saving(random_graph(case, 9 + case), 1 + case % 3)
    memory = None if case % 4 else [draw.randint(2000, 9000) for _ in range(count)]
    fleet = fleet_of([draw.uniform(2, 20) for _ in range(count)], case, memory=memory)
    return problem_of(graph, fleet, micro_batches=4, schedule=schedule)


def cost(case: int, planner: str) -> Cost:
    try:
        found = plan(planner, problem(case))
    except FleetTooSmall:
        return Cost()
    return Cost(step_s=found.predicted.step_s)
