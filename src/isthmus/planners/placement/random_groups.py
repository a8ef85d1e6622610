"""`random`: the best of many random placements, the baseline of DT-FM's Figure 4."""

from __future__ import annotations

import numpy as np

from isthmus.planners.placement.grouping import StageGrouping, evaluate, landscape_of
from isthmus.planners.placement.problem import Ints, PlacementProblem


def random_groups(problem: PlacementProblem, *, seed: int = 0, draws: int = 1) -> StageGrouping:
    """The cheapest of `draws` random balanced groupings, each with its best order and matching."""
    rng, landscape = np.random.default_rng(seed), landscape_of(problem)
    found = (evaluate(problem, shuffled(problem, rng), landscape) for _ in range(max(1, draws)))
    return min(found, key=lambda grouping: grouping.total_s)


def shuffled(problem: PlacementProblem, rng: np.random.Generator) -> Ints:
    """[stages, replicas] device numbers in random order."""
    return rng.permutation(len(problem.kind)).reshape(problem.task.stages, problem.task.replicas)
