"""Which executor trains which clients of a federated round: the algorithms, and the time model that they need."""

from isthmus.planners.cohort.certified import certified
from isthmus.planners.cohort.fractional import Fractional, fractional
from isthmus.planners.cohort.parrot import near_states, parrot, uniform
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule
from isthmus.planners.cohort.registry import COHORT_ALGORITHMS, CohortAlgorithm, schedule_cohort
from isthmus.planners.cohort.times import TimeHistory, TimeModel, equal_times, fit_times

__all__ = [
    "COHORT_ALGORITHMS",
    "CohortAlgorithm",
    "CohortProblem",
    "CohortSchedule",
    "Fractional",
    "TimeHistory",
    "TimeModel",
    "certified",
    "equal_times",
    "fit_times",
    "fractional",
    "near_states",
    "parrot",
    "schedule_cohort",
    "uniform",
]
