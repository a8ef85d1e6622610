"""Which device runs which stage of which replica on a heterogeneous network: DT-FM's problem and its searches."""

from collections.abc import Callable, Mapping

from isthmus.planners.placement.dtfm import dtfm_genetic, dtfm_genetic_code, dtfm_kl
from isthmus.planners.placement.grouping import StageGrouping, evaluate, random_groups
from isthmus.planners.placement.problem import PlacementProblem, PlacementTask, from_fleet, from_matrices

PLACEMENTS: Mapping[str, Callable[[PlacementProblem, int], StageGrouping]] = {
    "dtfm-genetic": lambda problem, seed: dtfm_genetic(problem, seed=seed),
    "dtfm-genetic-code": lambda problem, seed: dtfm_genetic_code(problem, seed=seed),
    "dtfm-kl": lambda problem, seed: dtfm_kl(problem, seed=seed),
    "random": lambda problem, seed: random_groups(problem, seed=seed),
}
"""Each with its own default budget. The same seed finds the same grouping."""

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
    "random_groups",
]
