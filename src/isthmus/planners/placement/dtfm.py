"""DT-FM's scheduler (sec. 3.4): a genetic search whose children are improved by circular local search.

`dtfm-genetic` moves an end of each group's fastest link. `dtfm-kl`, the baseline of Figure 4, is circular
Kernighan-Lin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.observer import stopped
from isthmus.planners.placement.grouping import StageGrouping, evaluate, landscape_of, shuffled
from isthmus.planners.placement.problem import PlacementProblem

Gain = Callable[[Ints, NDArray[np.bool_]], Floats]
"""(group of each device, which devices may move) -> [devices, groups] gain of each move; -inf for what may not be."""
CROSSED = 5  # places where the child takes the first parent's label: the public code's five-point crossover

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
    last_ring: bool  # whether the last ring of a local search counts: the code adds up the rings' gains one short
    both_ends: bool
    """Whether both ends of a group's fastest link may leave, all of them where links tie: the code takes the first."""


PAPER = Rules(replaced=worst_of_all, last_ring=True, both_ends=True)
CODE = Rules(replaced=worse_parent, last_ring=False, both_ends=False)


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


def dtfm_kl(problem: PlacementProblem, *, seed: int = 0, population: int = 100, trials: int = 1000) -> StageGrouping:
    """The hybrid genetic search with Kernighan and Lin's gain in its local search."""
    return hybrid_genetic(problem, kernighan_lin_of(problem), seed=seed, population=population, trials=trials)


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


class _Move(NamedTuple):
    device: int
    source: int
    target: int
    gain: float
    gain_home: float  # the gain of the move to the ring's first group instead, which would close the ring here


def cyclic_search(labels: Ints, groups: int, gain: Gain, *, last_ring: bool = True) -> Ints:
    """The labels [devices] after the best prefix of up to `groups` rings of moves; no device moves twice.

    Kang and Moon's cyclic partitioning (2000): devices move in a ring of groups, so that sizes stay equal. Without
    `last_ring` the prefix ends before the last of the rings that were made.
    """
    movable = np.ones(len(labels), dtype=np.bool_)
    visited: set[int] = set()
    made, total = [(0.0, labels)], 0.0
    for _ in range(groups):
        moves = _ring(made[-1][1], movable, visited, gain)
        if not moves:
            break
        now, gained = _closed(made[-1][1], moves)
        total += gained
        made.append((total, now))
        if len(visited) == groups:
            break
    counted = made if last_ring or len(made) == 1 else made[:-1]
    return max(counted, key=lambda after: after[0])[1]


def _ring(labels: Ints, movable: NDArray[np.bool_], visited: set[int], gain: Gain) -> list[_Move]:
    """Moves from group to group until one returns to the first group. Locks what it moves."""
    labels = labels.copy()
    moves: list[_Move] = []
    gains = gain(labels, movable)
    home = here = int(labels[int(gains.max(axis=1).argmax())])
    while True:
        choices = np.where((labels == here)[:, None], gains, -np.inf)
        device, target = (int(i) for i in np.unravel_index(int(choices.argmax()), choices.shape))
        if choices[device, target] == -np.inf:  # everything in this group has moved before
            return moves
        # From the first group there is no going home: that ring moves nothing.
        gain_home = 0.0 if here == home else float(gains[device, home])
        moves.append(_Move(device, here, target, float(gains[device, target]), gain_home))
        labels[device] = target
        movable[device] = False
        visited.add(target)
        here = target
        if here == home:
            return moves
        gains = gain(labels, movable)


def _closed(labels: Ints, moves: list[_Move]) -> tuple[Ints, float]:
    """The best prefix of a ring, its last device sent home instead, and what that gains (0 where nothing moves)."""
    sums = np.cumsum([0.0, *(move.gain for move in moves[:-1])])
    closings = sums + np.array([move.gain_home for move in moves])
    last = int(closings.argmax())
    if closings[last] <= 0:
        return labels, 0.0
    closed = labels.copy()
    for move in moves[:last]:
        closed[move.device] = move.target
    closed[moves[last].device] = moves[0].source
    return closed, float(closings[last])


def gain_of(problem: PlacementProblem, rules: Rules) -> Gain:
    _, hop_s = problem.between_devices()
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
        inside = _membership(labels, groups)
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


def kernighan_lin_of(problem: PlacementProblem) -> Gain:
    sync_s, hop_s = problem.between_devices()
    return kernighan_lin_gain(hop_s, sync_s, problem.task.stages)


def kernighan_lin_gain(hop_s: Floats, sync_s: Floats, groups: int) -> Gain:
    """gain_KL for one device that leaves, over links [devices, devices] weighed by hop - sync.

        sum over C' of w  -  sum over C of w

    A link inside a group costs a sync and saves a hop, which is the weight that the public code takes too.
    """
    weight = hop_s - sync_s
    np.fill_diagonal(weight, 0.0)

    def gain(labels: Ints, movable: NDArray[np.bool_]) -> Floats:
        inside = _membership(labels, groups)
        towards = weight @ inside
        own = towards[np.arange(len(labels)), labels]
        return np.where(movable[:, None] & (inside == 0), towards - own[:, None], -np.inf)

    return gain


def _membership(labels: Ints, groups: int) -> Floats:
    """[devices, groups]: 1 where the device belongs to the group."""
    return (labels[:, None] == np.arange(groups)).astype(np.float64)
