"""A round's schedule: what it depends on, and how it is made. A host calls `plan_round` where a machine asks for it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from isthmus.planners.cohort import CohortProblem, CohortSchedule, certified, fractional, parrot, schedule_cohort
from isthmus.planners.cohort.problem import Floats

STEP_S = 1e-4  # the rough seconds of one exchange of the certified search
FEWEST_STEPS, MOST_STEPS = 300, 4000
LARGE = 100_000_000
"""Clients x executors from where on the certified search's tables would be larger than 1 GB; then it is Parrot's."""
TINY_S = 1e-12


class PlanningProblem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that a round's schedule depends on. Arrays are not changed."""

    planner: str
    sizes: Floats  # (clients,) in samples
    seconds_per_sample: Floats  # (executors,)
    fixed_s: Floats  # (executors,) what a client costs whatever its size
    known: bool  # whether these times were measured; else they are of sizes alone


def plan_round(problem: PlanningProblem) -> CohortSchedule:
    """The schedule over the problem's executors, in their order.

    `certified` looks no longer than a better schedule could save: short rounds are Parrot's.
    """
    sizes, per_sample, fixed_s = problem.sizes, problem.seconds_per_sample, problem.fixed_s
    if len(fixed_s) == 1:
        return _everything(problem)
    cohort = CohortProblem(sizes=sizes, seconds_per_sample=per_sample, fixed_s=fixed_s)
    if problem.planner != "certified":
        return schedule_cohort(problem.planner, cohort)
    greedy = parrot(cohort)
    if not problem.known or cohort.clients * cohort.executors > LARGE:
        return greedy
    at_least_s = float(sizes.sum() / (1 / np.maximum(per_sample, TINY_S)).sum())
    if greedy.makespan_s - at_least_s < FEWEST_STEPS * STEP_S:
        return greedy
    # What clients take whatever their size is left out there: it would pass for something to be saved.
    bound_s = min(fractional(cohort).lower_bound_s, greedy.makespan_s)
    steps = int((greedy.makespan_s - bound_s) / STEP_S)
    if steps < FEWEST_STEPS:
        return replace(greedy, lower_bound_s=bound_s)
    return certified(cohort, steps=min(steps, MOST_STEPS))


def _everything(problem: PlanningProblem) -> CohortSchedule:
    """There is one executor: it trains them all, by every planner."""
    clients = len(problem.sizes)
    load_s = float(problem.seconds_per_sample[0]) * float(problem.sizes.sum()) + float(problem.fixed_s[0]) * clients
    return CohortSchedule(
        algorithm=problem.planner,
        executor_of=np.zeros(clients, dtype=np.int64),
        load_s=np.array([load_s]),
        lower_bound_s=load_s,
    )
