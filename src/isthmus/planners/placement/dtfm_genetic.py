"""`dtfm-genetic`: DT-FM's scheduler, a genetic search whose local search moves an end of each group's fastest link."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.planners.network import Floats
from isthmus.planners.placement.cyclic import Gain, membership
from isthmus.planners.placement.grouping import Grouping
from isthmus.planners.placement.hybrid_genetic import hybrid_genetic
from isthmus.planners.placement.problem import Ints, PlacementProblem


def dtfm_genetic(problem: PlacementProblem, *, seed: int = 0, population: int = 100, trials: int = 1000) -> Grouping:
    """The paper's scheduler (sec. 3.4); the paper runs a population of 100 through 4,900 trials."""
    gain = fastest_link_gain(problem.hop_s[np.ix_(problem.kind, problem.kind)], problem.task.stages)
    return hybrid_genetic(problem, gain, seed=seed, population=population, trials=trials)


def fastest_link_gain(hop_s: Floats, groups: int) -> Gain:
    """Half of the paper's Gain: one device d1 that leaves, with hop_s [devices, devices].

        mean over d'' in C' of w(d1, d'')  -  w(d1, d2),    d1 - d2 the fastest link inside C

    Ends of the fastest link are the only candidates; where several links tie, all their ends are.
    """
    links = hop_s.copy()
    np.fill_diagonal(links, 0.0)
    apart = hop_s.copy()
    np.fill_diagonal(apart, np.inf)

    def gain(labels: Ints, movable: NDArray[np.bool_]) -> Floats:
        inside = membership(labels, groups)
        mean = links @ inside / np.maximum(inside.sum(axis=0), 1.0)
        fastest = np.where(labels[:, None] == labels, apart, np.inf).min(axis=1)
        of_group = np.where(movable[:, None] & (inside > 0), fastest[:, None], np.inf).min(axis=0)
        candidate = movable & (fastest <= of_group[labels])
        # A group of one has no link inside that moving would free.
        freed = np.where(np.isinf(fastest), 0.0, fastest)
        return np.where(candidate[:, None] & (inside == 0), mean - freed[:, None], -np.inf)

    return gain
