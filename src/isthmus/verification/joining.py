"""What joining devices by links costs at least, whichever devices they are.

Edges are taken lightest first and merge components (Kruskal). Before edges of weight w are taken, k devices lie in no
fewer than c_w components, the largest ones; to join them into f trees takes c_w - f edges of weight w or more.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence

from isthmus.fleet import Fleet

MOST_JOINED = 512
"""Devices up to which components are counted; beyond, each device has its lightest edge."""

Weights = Mapping[tuple[int, int], float]
"""Between kinds of devices; (k, k) joins two devices of one kind."""


def kinds_of(fleet: Fleet) -> list[list[str]]:
    """Devices that no link names, by region; each other one alone."""
    named = {end for route in fleet.links.devices for end in (route.source, route.target)}
    found: dict[tuple[bool, str], list[str]] = {}
    for device in fleet.devices:
        alone = device.name in named
        found.setdefault((alone, device.name if alone else device.region), []).append(device.name)
    return list(found.values())


class DeviceMerging:
    """`most` devices at most are joined. `weights` must not depend on the direction."""

    def __init__(self, sizes: Sequence[int], weights: Weights, most: int) -> None:
        self._count, self._most = sum(sizes), most
        self._steps: list[tuple[float, list[int]]] = []
        """(weight, [k]: components of the k devices before edges of that weight), lightest first."""
        self._nearest: list[float] = []
        """Where there are too many devices: the lightest edge of each, lightest first."""
        if self._count > MOST_JOINED:
            for kind, size in enumerate(sizes):
                lightest = min(w for (a, b), w in weights.items() if kind in (a, b))
                self._nearest += [lightest] * size
            self._nearest = sorted(self._nearest)[: self._count - 1]
        elif self._count > 1:
            self._merge(sizes, weights)

    def _merge(self, sizes: Sequence[int], weights: Weights) -> None:
        kind = [k for k, size in enumerate(sizes) for _ in range(size)]
        edges = sorted((weights[kind[a], kind[b]], a, b) for a, b in itertools.combinations(range(self._count), 2))
        home, members = list(range(self._count)), {d: [d] for d in range(self._count)}
        for weight, group in itertools.groupby(edges, key=lambda edge: edge[0]):
            merging = [(a, b) for _, a, b in group if home[a] != home[b]]
            if merging:
                together = list(itertools.accumulate(sorted(map(len, members.values()), reverse=True)))
                need = [bisect.bisect_left(together, k) + 1 for k in range(self._most + 1)]
                self._steps.append((weight, need))
            for a, b in merging:
                if home[a] != home[b]:
                    gone = home[b]
                    for device in members.pop(gone):
                        home[device] = home[a]
                        members[home[a]].append(device)
            if len(members) == 1:
                return

    def total(self, devices: int, trees: int) -> float:
        """The least weight that joins so many devices into at most `trees` trees."""
        if self._nearest:
            return sum(self._nearest[: max(devices - trees, 0)])
        before, found = 0.0, 0.0
        for weight, need in self._steps:
            found += (weight - before) * max(0, need[devices] - trees)
            before = weight
        return found

    def heaviest(self, devices: int) -> float:
        """The least weight of the heaviest edge of a tree of so many devices."""
        if self._nearest:
            return self._nearest[devices - 2] if devices > 1 else 0.0
        return max((weight for weight, need in self._steps if need[devices] > 1), default=0.0)
