"""The cohort algorithms by name.

An algorithm is a function from a `CohortProblem` to a `CohortSchedule`; the first line of its docstring describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.errors import unknown_name
from isthmus.planners.cohort.certified import certified
from isthmus.planners.cohort.parrot import parrot, uniform
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule

CohortAlgorithm = Callable[[CohortProblem], CohortSchedule]

COHORT_ALGORITHMS: Mapping[str, CohortAlgorithm] = {"certified": certified, "parrot": parrot, "uniform": uniform}


def schedule_cohort(name: str, problem: CohortProblem) -> CohortSchedule:
    """The schedule that the algorithm makes. Raises UserError for an unknown name."""
    if name not in COHORT_ALGORITHMS:
        raise unknown_name("cohort algorithm", name, COHORT_ALGORITHMS)
    return COHORT_ALGORITHMS[name](problem)
