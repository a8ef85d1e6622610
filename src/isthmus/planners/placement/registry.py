"""The placements by name, and the one call that runs one and proves how good it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.errors import unknown_name
from isthmus.planners.placement.bounds import lower_bound_s
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


def place(name: str, problem: PlacementProblem, *, seed: int = 0) -> StageGrouping:
    """The grouping that this placement finds, with a lower bound. Raises UserError for an unknown name."""
    if name not in PLACEMENTS:
        raise unknown_name("placement", name, PLACEMENTS)
    found = PLACEMENTS[name](problem, seed)
    return found.with_bound(lower_bound_s(problem, found.total_s))
