"""DT-FM's hybrid genetic search (sec. 3.4): crossover, then local search, and the worst of the population leaves."""

from __future__ import annotations

import numpy as np

from isthmus.planners.placement.cyclic import Gain, cyclic_search
from isthmus.planners.placement.grouping import Grouping, evaluate, landscape_of
from isthmus.planners.placement.problem import Ints, PlacementProblem
from isthmus.planners.placement.random_groups import shuffled

CROSSED = 5
"""Places where the child takes the first parent's label: the public code's five-point crossover."""


def hybrid_genetic(problem: PlacementProblem, gain: Gain, *, seed: int, population: int, trials: int) -> Grouping:
    """The best grouping of a population that starts at random and sees `trials` children.

    A child enters if it is better than the worst, as the paper says. (The public code compares with the parents.)
    """
    rng, landscape, stages = np.random.default_rng(seed), landscape_of(problem), problem.task.stages
    starts = [shuffled(problem, rng) for _ in range(max(2, population))]
    members = [labels_of(groups) for groups in starts]
    found = [evaluate(problem, groups, landscape) for groups in starts]
    costs = np.array([grouping.total_s for grouping in found])
    best = found[int(costs.argmin())]
    for _ in range(trials):
        first, second = rng.integers(len(members), size=2)
        child = crossover(members[first], members[second], stages, rng.permutation(len(problem.kind))[:CROSSED])
        child = cyclic_search(child, stages, gain)
        offspring = evaluate(problem, groups_of(child, stages), landscape)
        worst = int(costs.argmax())
        if offspring.total_s < costs[worst]:
            members[worst], costs[worst] = child, offspring.total_s
        if offspring.total_s < best.total_s:
            best = offspring
    return best


def crossover(first: Ints, second: Ints, groups: int, points: Ints) -> Ints:
    """The second parent's labels [devices] with the first's at `points`; then groups that are too large give away.

    Devices leave in order of their number, for the first group that has room.
    """
    child = second.copy()
    child[points] = first[points]
    room = len(child) // groups - np.bincount(child, minlength=groups)
    for device in range(len(child)):
        if room[child[device]] < 0:
            target = int((room > 0).argmax())
            room[child[device]] += 1
            room[target] -= 1
            child[device] = target
    return child


def labels_of(groups: Ints) -> Ints:
    """[devices]: the row of `groups` in which each stands."""
    labels = np.empty(groups.size, dtype=np.int64)
    labels[groups] = np.arange(len(groups))[:, None]
    return labels


def groups_of(labels: Ints, groups: int) -> Ints:
    """[groups, devices / groups]: the members of each group, ascending."""
    return np.argsort(labels, kind="stable").reshape(groups, -1)
