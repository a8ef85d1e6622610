"""DT-FM's hybrid genetic search (sec. 3.4): crossover, local search, and a good child replaces a member."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.observer import stopped
from isthmus.planners.placement.cyclic import Gain, cyclic_search
from isthmus.planners.placement.grouping import StageGrouping, evaluate, landscape_of, shuffled
from isthmus.planners.placement.problem import PlacementProblem

CROSSED = 5
"""Places where the child takes the first parent's label: the public code's five-point crossover."""

Replaced = Callable[[Floats, int, int, float], int | None]
"""(costs of the population, first parent, second parent, the child's cost) -> who leaves; None: the child does."""


def worst_of_all(costs: Floats, first: int, second: int, child_s: float) -> int | None:
    """The paper's text: the worst of the population, if the child is better."""
    worst = int(costs.argmax())
    return worst if child_s < costs[worst] else None


def worse_parent(costs: Floats, first: int, second: int, child_s: float) -> int | None:
    """The public code: the worse of the two parents, if the child costs no more than the first.

    The code writes `max(first, child > second)`, which compares a cost with a truth value: above one second, as in all
    of its cases, only the first parent counts.
    """
    if child_s > costs[first]:
        return None
    return first if costs[first] > costs[second] else second


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Where the paper's text and the authors' public code (github.com/DS3Lab/DT-FM) differ."""

    replaced: Replaced
    last_ring: bool
    """Whether the last ring of a local search counts: the code adds up the rings' gains one short."""
    both_ends: bool
    """Whether both ends of a group's fastest link may leave, all of them where links tie: the code takes the first."""


PAPER = Rules(replaced=worst_of_all, last_ring=True, both_ends=True)
CODE = Rules(replaced=worse_parent, last_ring=False, both_ends=False)


def hybrid_genetic(
    problem: PlacementProblem, gain: Gain, rules: Rules = PAPER, *, seed: int, population: int, trials: int
) -> StageGrouping:
    """The best grouping of a population that starts at random and sees `trials` children."""
    candidates = islice(search(problem, gain, rules, seed=seed, population=population), max(2, population) + trials)
    return min(_until_stopped(candidates), key=lambda grouping: grouping.total_s)


def _until_stopped(candidates: Iterator[StageGrouping]) -> Iterator[StageGrouping]:
    """One at least."""
    for candidate in candidates:
        yield candidate
        if stopped():
            return


def search(
    problem: PlacementProblem, gain: Gain, rules: Rules = PAPER, *, seed: int, population: int
) -> Iterator[StageGrouping]:
    """Every candidate in turn: the population, then children without end."""
    rng, landscape, stages = np.random.default_rng(seed), landscape_of(problem), problem.task.stages
    members: list[Ints] = []
    costs = np.empty(max(2, population))
    for groups in [shuffled(problem, rng) for _ in costs]:
        start = evaluate(problem, groups, landscape)
        costs[len(members)] = start.total_s
        members.append(labels_of(groups))
        yield start
    while True:
        first, second = (int(k) for k in rng.integers(len(members), size=2))
        child = crossover(members[first], members[second], stages, rng.permutation(len(problem.kind))[:CROSSED])
        child = cyclic_search(child, stages, gain, last_ring=rules.last_ring)
        offspring = evaluate(problem, groups_of(child, stages), landscape)
        leaves = rules.replaced(costs, first, second, offspring.total_s)
        if leaves is not None:
            members[leaves], costs[leaves] = child, offspring.total_s
        yield offspring


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
