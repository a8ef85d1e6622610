"""Which executor trains which clients of a federated round: the algorithms, and the time model that they need.

An algorithm is a function from a `CohortProblem` to a `CohortSchedule`; the first line of its docstring describes it.
"""

from collections.abc import Callable, Mapping

from isthmus.errors import unknown_name
from isthmus.planners.cohort.certified import certified, fractional
from isthmus.planners.cohort.parrot import TimeHistory, TimeModel, equal_times, fit_times, parrot, uniform
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule

__all__ = [
    "COHORT_ALGORITHMS",
    "CohortProblem",
    "CohortSchedule",
    "TimeHistory",
    "TimeModel",
    "certified",
    "equal_times",
    "fit_times",
    "fractional",
    "parrot",
    "schedule_cohort",
    "uniform",
]

COHORT_ALGORITHMS: Mapping[str, Callable[[CohortProblem], CohortSchedule]] = {
    "certified": certified,
    "parrot": parrot,
    "uniform": uniform,
}


def schedule_cohort(name: str, problem: CohortProblem) -> CohortSchedule:
    """The schedule that the algorithm makes. Raises UserError for an unknown name."""
    if name not in COHORT_ALGORITHMS:
        raise unknown_name("cohort algorithm", name, COHORT_ALGORITHMS)
    return COHORT_ALGORITHMS[name](problem)
