"""A placement and what it costs, evaluated exactly as DT-FM defines it; and random ones, its Figure 4's baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from isthmus.cost.kernel import Floats, Ints
from isthmus.errors import UserError
from isthmus.planners.placement.matching import bottleneck_matching
from isthmus.planners.placement.path import open_path, path_length_s
from isthmus.planners.placement.problem import PlacementProblem

Group = tuple[int, ...]
"""The sorted kinds of its members. Where links depend only on region that is a count of devices per region, and few
different groups exist; where every device is a kind of its own it is a set of devices."""

_MOST_KEPT = 400_000


class Landscape:
    """Costs of groups over `kinds`, whose links are [kinds, kinds] matrices of seconds (see `PlacementProblem`).

    Kept once computed: searches meet the same groups again and again."""

    def __init__(self, sync_s: Floats, hop_s: Floats) -> None:
        def slowest_s(group: Group) -> float:
            links = sync_s[np.ix_(group, group)]
            return float((links.sum(axis=1) - links.diagonal()).max())

        def pair_s(a: Group, b: Group) -> float:
            return bottleneck_matching(hop_s[np.ix_(a, b)])[0]

        self._group_s, self._pair_s = lru_cache(_MOST_KEPT)(slowest_s), lru_cache(_MOST_KEPT)(pair_s)

    def group_s(self, group: Group) -> float:
        """DT-FM Eq. 2: the slowest member's exchange of shards with all others of the group."""
        return self._group_s(group)

    def hop_s(self, a: Group, b: Group) -> float:
        """DT-FM Eq. 3: the slowest pair of the best perfect matching between two groups."""
        return self._pair_s(a, b) if a <= b else self._pair_s(b, a)

    def between(self, groups: list[Group]) -> Floats:
        """[groups, groups]: DT-FM's coarsened graph (Fig. 2c); 0 on the diagonal."""
        cost = np.zeros((len(groups), len(groups)))
        for i, a in enumerate(groups):
            for j in range(i):
                cost[i, j] = cost[j, i] = self.hop_s(a, groups[j])
        return cost


@dataclass(frozen=True, kw_only=True, eq=False)
class StageGrouping:
    """Which device runs which stage of which replica, and the seconds that this takes.

    `data_parallel_s` is Eq. 2's maximum over groups, `pipeline_s` Eq. 4's path. `compute_s` is ours: every group waits
    for its slowest device, so it is the sum over groups of the longest computation; the period needs no term, for
    stages are equal and every device takes part, so it is the same for all placements.
    """

    devices: Ints
    """[stages, replicas]: row s is the data-parallel group of stage s, column r the pipeline of replica r."""
    data_parallel_s: float
    pipeline_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """DT-FM Eq. 1, and the computation."""
        return self.data_parallel_s + self.pipeline_s + self.compute_s


def evaluate(problem: PlacementProblem, groups: Ints, landscape: Landscape | None = None) -> StageGrouping:
    """The grouping made of these data-parallel groups, [stages, replicas] device numbers in any order.

    Chooses the order of groups (exact up to ten, see `path`) and who hands over to whom. A landscape made by
    `landscape_of(problem)` saves work over many calls. Raises UserError unless each device stands in one group.
    """
    stages, replicas = problem.task.stages, problem.task.replicas
    if groups.shape != (stages, replicas) or not np.array_equal(np.sort(groups, axis=None), np.arange(groups.size)):
        raise UserError(
            f"placement: groups: got shape {groups.shape}, expected {stages} groups of {replicas} with each device once"
        )
    landscape = landscape or landscape_of(problem)
    kinds = [kinds_of(problem, row) for row in groups]
    between = landscape.between(kinds)
    order = open_path(between)
    return StageGrouping(
        devices=_joined(problem, groups[order]),
        data_parallel_s=max(landscape.group_s(group) for group in kinds),
        pipeline_s=path_length_s(between, order),
        compute_s=float(problem.compute_s[groups].max(axis=1).sum()),
    )


def landscape_of(problem: PlacementProblem) -> Landscape:
    return Landscape(problem.sync_s, problem.hop_s)


def kinds_of(problem: PlacementProblem, devices: Ints) -> Group:
    return tuple(int(kind) for kind in np.sort(problem.kind[devices]))


def _joined(problem: PlacementProblem, ordered: Ints) -> Ints:
    """Each row sorted so that a column is one pipeline, following the bottleneck matching of neighbours."""
    joined = [ordered[0]]
    for row in ordered[1:]:
        _, columns = bottleneck_matching(problem.hop_s[np.ix_(problem.kind[joined[-1]], problem.kind[row])])
        joined.append(row[columns])
    return np.array(joined)


def random_groups(problem: PlacementProblem, *, seed: int = 0, draws: int = 1) -> StageGrouping:
    """The cheapest of `draws` random balanced groupings, each with its best order and matching."""
    rng, landscape = np.random.default_rng(seed), landscape_of(problem)
    found = (evaluate(problem, shuffled(problem, rng), landscape) for _ in range(max(1, draws)))
    return min(found, key=lambda grouping: grouping.total_s)


def shuffled(problem: PlacementProblem, rng: np.random.Generator) -> Ints:
    """[stages, replicas] device numbers in random order."""
    return rng.permutation(len(problem.kind)).reshape(problem.task.stages, problem.task.replicas)
