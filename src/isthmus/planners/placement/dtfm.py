"""DT-FM's scheduler, a genetic search, by the gain of its local search.

`dtfm-genetic` moves an end of each group's fastest link. `dtfm-kl`, the baseline of Figure 4, is circular
Kernighan-Lin.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.placement.cyclic import Gain, membership
from isthmus.planners.placement.grouping import StageGrouping
from isthmus.planners.placement.hybrid_genetic import CODE, PAPER, Rules, hybrid_genetic
from isthmus.planners.placement.problem import PlacementProblem


def dtfm_genetic(
    problem: PlacementProblem, *, seed: int = 0, population: int = 100, trials: int = 1000, rules: Rules = PAPER
) -> StageGrouping:
    """The paper's scheduler (sec. 3.4); the paper runs a population of 100 through 4,900 trials."""
    return hybrid_genetic(problem, gain_of(problem, rules), rules, seed=seed, population=population, trials=trials)


def dtfm_genetic_code(
    problem: PlacementProblem, *, seed: int = 0, population: int = 100, trials: int = 1000
) -> StageGrouping:
    """The same search by the rules of the authors' public code, which runs 4,900 trials too."""
    return dtfm_genetic(problem, seed=seed, population=population, trials=trials, rules=CODE)


def gain_of(problem: PlacementProblem, rules: Rules) -> Gain:
    hop_s = problem.hop_s[np.ix_(problem.kind, problem.kind)]
    return fastest_link_gain(hop_s, problem.task.stages, both_ends=rules.both_ends)


def fastest_link_gain(hop_s: Floats, groups: int, *, both_ends: bool = True) -> Gain:
    """Half of the paper's Gain: one device d1 that leaves, with hop_s [devices, devices].

        mean over d'' in C' of w(d1, d'')  -  w(d1, d2),    d1 - d2 the fastest link inside C

    Ends of the fastest link are the only candidates; where several links tie, all their ends are. Without `both_ends`
    the one of lowest number is.
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
        if not both_ends:
            candidate &= _first_of_group(labels, candidate, groups)
        # A group of one has no link inside that moving would free.
        freed = np.where(np.isinf(fastest), 0.0, fastest)
        return np.where(candidate[:, None] & (inside == 0), mean - freed[:, None], -np.inf)

    return gain


def _first_of_group(labels: Ints, candidate: NDArray[np.bool_], groups: int) -> NDArray[np.bool_]:
    first = np.zeros_like(candidate)
    first[(candidate[:, None] & (labels[:, None] == np.arange(groups))).argmax(axis=0)] = True
    return first


def dtfm_kl(problem: PlacementProblem, *, seed: int = 0, population: int = 100, trials: int = 1000) -> StageGrouping:
    """The hybrid genetic search with Kernighan and Lin's gain in its local search."""
    return hybrid_genetic(problem, kernighan_lin_of(problem), seed=seed, population=population, trials=trials)


def kernighan_lin_of(problem: PlacementProblem) -> Gain:
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
