"""`dtfm-kl`: the same genetic search with circular Kernighan-Lin, the baseline of DT-FM's Figure 4."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.cost.network import Floats
from isthmus.planners.placement.cyclic import Gain, membership
from isthmus.planners.placement.grouping import StageGrouping
from isthmus.planners.placement.hybrid_genetic import hybrid_genetic
from isthmus.planners.placement.problem import Ints, PlacementProblem


def dtfm_kl(problem: PlacementProblem, *, seed: int = 0, population: int = 100, trials: int = 1000) -> StageGrouping:
    """The hybrid genetic search with Kernighan and Lin's gain in its local search."""
    return hybrid_genetic(problem, gain_of(problem), seed=seed, population=population, trials=trials)


def gain_of(problem: PlacementProblem) -> Gain:
    places = np.ix_(problem.kind, problem.kind)
    return kernighan_lin_gain(problem.hop_s[places], problem.sync_s[places], problem.task.stages)


def kernighan_lin_gain(hop_s: Floats, sync_s: Floats, groups: int) -> Gain:
    """gain_KL for one device that leaves, over links [devices, devices] weighed by hop - sync.

        sum over C' of w  -  sum over C of w

    A link inside a group costs a sync and saves a hop, which is the weight that the public code takes too.
    """
    weight = hop_s - sync_s
    np.fill_diagonal(weight, 0.0)

    def gain(labels: Ints, movable: NDArray[np.bool_]) -> Floats:
        inside = membership(labels, groups)
        towards = weight @ inside
        own = towards[np.arange(len(labels)), labels]
        return np.where(movable[:, None] & (inside == 0), towards - own[:, None], -np.inf)

    return gain
