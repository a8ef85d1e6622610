"""The placements by name. How good one is `lower_bound_s` proves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.planners.placement.dtfm import dtfm_genetic, dtfm_genetic_code, dtfm_kl
from isthmus.planners.placement.grouping import StageGrouping, random_groups
from isthmus.planners.placement.islands import islands
from isthmus.planners.placement.problem import PlacementProblem

PLACEMENTS: Mapping[str, Callable[[PlacementProblem, int], StageGrouping]] = {
    "dtfm-genetic": lambda problem, seed: dtfm_genetic(problem, seed=seed),
    "dtfm-genetic-code": lambda problem, seed: dtfm_genetic_code(problem, seed=seed),
    "dtfm-kl": lambda problem, seed: dtfm_kl(problem, seed=seed),
    "islands": lambda problem, seed: islands(problem, seed=seed),
    "random": lambda problem, seed: random_groups(problem, seed=seed),
}
"""Each with its own default budget. The same seed finds the same grouping."""
