"""Which executor trains which clients of a federated round: the algorithms, and the time model that they need."""

from isthmus.planners.cohort.certified import certified
from isthmus.planners.cohort.fractional import Fractional, fractional
from isthmus.planners.cohort.parrot import near_states, parrot, uniform
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule
from isthmus.planners.cohort.registry import CohortAlgorithm, cohort_names, describe_cohort, schedule_cohort
from isthmus.planners.cohort.times import TimeHistory, TimeModel, equal_times, fit_times

__all__ = [
    "CohortAlgorithm",
    "CohortProblem",
    "CohortSchedule",
    "Fractional",
    "TimeHistory",
    "TimeModel",
    "certified",
    "cohort_names",
    "describe_cohort",
    "equal_times",
    "fit_times",
    "fractional",
    "near_states",
    "parrot",
    "schedule_cohort",
    "uniform",
]
