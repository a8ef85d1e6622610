"""Parrot's schedule of the first R_w rounds, before any time was recorded: equal numbers of clients (Algorithm 3)."""

from __future__ import annotations

import numpy as np

from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule, scheduled


def uniform(problem: CohortProblem) -> CohortSchedule:
    """Equal numbers of clients per executor, to within one, in turn; sizes and times are not looked at."""
    executor_of = np.arange(problem.clients, dtype=np.int64) % problem.executors
    return scheduled(problem, executor_of, algorithm="uniform")
