"""Chains that several holders feed: priced with every copy, and found as brute force finds them."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator

import pytest
from plan_cases import problem_of, random_graph
from term_cases import priced_fleet
from tests.tiers import represented_by

from isthmus.cost import Problem, build_plan, preference
from isthmus.errors import FleetTooSmall, UserError
from isthmus.graph import cuts
from isthmus.planners import plan as make_plan
from isthmus.plans import Constraints, Objective, OwnSamples, Plan


def fed_problem(
    seed: int,
    devices: int,
    *,
    holders: int = 2,
    labels_stay: bool = False,
    objective: Objective = "time",
    memory: int = 1 << 40,
    operators: int = 6,
) -> Problem:
    rng = random.Random(seed)
    fleet = priced_fleet(seed, devices, memory=[memory] * devices)
    constraints = Constraints(
        objective=objective,
        data_holders=fleet.names[:holders],
        labels_stay=labels_stay,
        own_samples=tuple(OwnSamples(train=rng.randint(1, 9), heldout=1) for _ in range(holders)),
    )
    return problem_of(
        random_graph(seed, operators), fleet, micro_batches=rng.choice([2, 4, 6]), constraints=constraints
    )


def every_chain(problem: Problem) -> Iterator[Plan]:
    first, *copies = problem.constraints.feeders
    others = [name for name in problem.fleet.names if name not in (first, *copies)]
    places = [cut.position for cut in cuts(problem.flow)]
    for size in range(len(others) + 1):
        for between in itertools.permutations(others, size):
            ends = [()] if not size or not problem.constraints.labels_stay else [(first,)]
            for end in ends:
                order = (first, *between, *end)
                for boundaries in itertools.combinations(places, len(order) - 1):
                    with contextlib.suppress(FleetTooSmall, UserError):
                        yield build_plan(problem, order, boundaries, planner="brute")


@pytest.mark.parametrize("objective", ["time", "cost"])
@pytest.mark.parametrize("labels_stay", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_chain_is_as_good_as_the_best_of_all(seed: int, labels_stay: bool, objective: Objective) -> None:
    problem = fed_problem(seed, 4, labels_stay=labels_stay, objective=objective)
    best = min(preference(problem, plan)[0] for plan in every_chain(problem))
    for planner in ("chain", "auto"):
        made = make_plan(planner, problem)
        assert preference(problem, made)[0] == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(
    ("seed", "holders", "labels_stay"),
    represented_by([(2, 2, False), (2, 3, True), (3, 2, True), (11, 3, False)], (2, 2, False), (3, 2, True)),
)
def test_where_memory_holds_copies_up_no_chain_is_below_the_bound(seed: int, holders: int, labels_stay: bool) -> None:
    """One device for all holders is held up longer than they are: it counts for what fits, and not for the bound."""

    def with_memory(memory: int) -> tuple[Problem, list[Plan]]:
        problem = fed_problem(seed, holders + 2, holders=holders, labels_stay=labels_stay, memory=memory)
        return problem, list(every_chain(problem))

    _, free = with_memory(1 << 40)
    stages = [stage.memory for plan in free for stage in plan.stages]
    kept, working = max(need.total - need.working for need in stages), max(need.working for need in stages)
    problem, chains = with_memory(int(kept * (0.3 if seed == 11 else 0.55)) + working)
    best = min(chains, key=lambda plan: plan.predicted.step_s)
    assert "memory" in best.predicted.bottleneck
    made = make_plan("chain", problem)
    assert made.predicted.step_s == pytest.approx(best.predicted.step_s, rel=1e-9)
