"""The cohort algorithms by name.

An algorithm is a function from a `CohortProblem` to a `CohortSchedule`; the first line of its docstring describes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from isthmus.errors import unknown_name
from isthmus.planners.cohort.certified import certified
from isthmus.planners.cohort.parrot import parrot, uniform
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule

CohortAlgorithm = Callable[[CohortProblem], CohortSchedule]

_ALGORITHMS: Mapping[str, CohortAlgorithm] = {"certified": certified, "parrot": parrot, "uniform": uniform}


def cohort_names() -> list[str]:
    """Every name that `schedule_cohort` takes, sorted."""
    return sorted(_ALGORITHMS)


def describe_cohort(name: str) -> str:
    """One line on what an algorithm does. Raises UserError for an unknown name."""
    return (inspect.getdoc(_algorithm(name)) or "").partition("\n")[0]


def schedule_cohort(name: str, problem: CohortProblem) -> CohortSchedule:
    """The schedule that the algorithm makes. Raises UserError for an unknown name."""
    return _algorithm(name)(problem)


def _algorithm(name: str) -> CohortAlgorithm:
    if name not in _ALGORITHMS:
        raise unknown_name("cohort algorithm", name, _ALGORITHMS)
    return _ALGORITHMS[name]
