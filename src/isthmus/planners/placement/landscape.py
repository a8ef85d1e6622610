"""What groups cost, kept once computed: searches meet the same groups again and again.

A group is the sorted tuple of its members' kinds. Where links depend only on region that is a count of devices per
region, and few different groups exist; where every device is a kind of its own it is a set of devices.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from isthmus.cost.network import Floats
from isthmus.planners.placement.matching import bottleneck_s

Group = tuple[int, ...]

Key = TypeVar("Key")

_MOST_KEPT = 400_000


class Landscape:
    """Costs of groups over `kinds`, whose links are [kinds, kinds] matrices of seconds (see `PlacementProblem`)."""

    def __init__(self, sync_s: Floats, hop_s: Floats) -> None:
        self._sync_s, self._hop_s = sync_s, hop_s
        self._groups: dict[Group, float] = {}
        self._pairs: dict[tuple[Group, Group], float] = {}

    def group_s(self, group: Group) -> float:
        """DT-FM Eq. 2: the slowest member's exchange of shards with all others of the group."""
        known = self._groups.get(group)
        if known is None:
            links = self._sync_s[np.ix_(group, group)]
            known = float((links.sum(axis=1) - links.diagonal()).max())
            _keep(self._groups)[group] = known
        return known

    def hop_s(self, a: Group, b: Group) -> float:
        """DT-FM Eq. 3: the slowest pair of the best perfect matching between two groups."""
        key = (a, b) if a <= b else (b, a)
        known = self._pairs.get(key)
        if known is None:
            known = bottleneck_s(self._hop_s[np.ix_(a, b)])
            _keep(self._pairs)[key] = known
        return known

    def between(self, groups: list[Group]) -> Floats:
        """[groups, groups]: DT-FM's coarsened graph (Fig. 2c); 0 on the diagonal."""
        cost = np.zeros((len(groups), len(groups)))
        for i, a in enumerate(groups):
            for j in range(i):
                cost[i, j] = cost[j, i] = self.hop_s(a, groups[j])
        return cost


def _keep(known: dict[Key, float]) -> dict[Key, float]:
    """The same store, emptied when it has grown too large: simpler than forgetting the oldest, and rarely met."""
    if len(known) >= _MOST_KEPT:
        known.clear()
    return known
