"""Which device runs which stage of which replica on a heterogeneous network: DT-FM's problem and its searches."""

from isthmus.planners.placement.bounds import lower_bound_s
from isthmus.planners.placement.dtfm import dtfm_genetic, dtfm_genetic_code, dtfm_kl
from isthmus.planners.placement.grouping import StageGrouping, evaluate, random_groups
from isthmus.planners.placement.islands import islands
from isthmus.planners.placement.problem import PlacementProblem, PlacementTask, from_fleet, from_matrices
from isthmus.planners.placement.registry import PLACEMENTS

__all__ = [
    "PLACEMENTS",
    "PlacementProblem",
    "PlacementTask",
    "StageGrouping",
    "dtfm_genetic",
    "dtfm_genetic_code",
    "dtfm_kl",
    "evaluate",
    "from_fleet",
    "from_matrices",
    "islands",
    "lower_bound_s",
    "random_groups",
]
