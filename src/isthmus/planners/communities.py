"""Devices that are well joined, and the order in which a pipeline passes through them.

Communities are Louvain's on the bandwidth graph (FusionLLM, section 4). A pipeline then visits one community after
another and leaves each only once:

    first community          second                third
    a ─ b ─ c ─ exit  ──►  entry ─ d ─ exit  ──►  entry ─ e ─ f
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import networkx as nx
import numpy as np
from networkx.algorithms.community import louvain_communities

from isthmus.planners.network import Floats, Network

Community = tuple[int, ...]
SEED = 0
"""Louvain visits devices in random order."""


def communities(network: Network) -> list[Community]:
    """Louvain communities of the graph whose weights are the mean bandwidth of both directions, in fleet order."""
    bandwidth = np.divide(1.0, network.byte_s, out=np.zeros_like(network.byte_s), where=network.byte_s > 0)
    graph = nx.from_numpy_array((bandwidth + bandwidth.T) / 2)
    found = louvain_communities(graph, weight="weight", seed=SEED)
    return sorted(tuple(sorted(int(device) for device in members)) for members in found)


def visiting_order(pair_s: Floats, groups: Sequence[Community]) -> list[Community]:
    """Each community as the order of its devices, one community after another.

    `pair_s[i, j]` are the seconds of a typical message from device i to j and back. Communities follow so that the best
    links between neighbours are short in sum; inside, each device is followed by the nearest one left.
    """
    between = np.array([[float(pair_s[np.ix_(a, b)].min()) for b in groups] for a in groups])
    ordered = [groups[k] for k in path(between)]
    joins = [_join(pair_s, a, b) for a, b in itertools.pairwise(ordered)]
    exits: list[int | None] = [*(leave for leave, _ in joins), None]
    entries: list[int | None] = [None, *(enter for _, enter in joins)]
    return [_walk(pair_s, m, i, o) for m, i, o in zip(ordered, entries, exits, strict=True)]


def path(between: Floats) -> list[int]:
    """A short path through all places: nearest neighbour from every start, the shortest improved by reversals."""
    tours = [_nearest(between, start) for start in range(len(between))]
    best = min(tours, key=lambda tour: _length(between, tour))
    improved = True
    while improved:
        improved = False
        for other in _reversals(best):
            if _length(between, other) < _length(between, best) * (1 - 1e-12):
                best, improved = other, True
                break
    return best


def _nearest(between: Floats, start: int, last: int | None = None, among: Collection[int] | None = None) -> list[int]:
    """From `start` always to the nearest place left, `last` at the end."""
    left = set(range(len(between)) if among is None else among) - {start, last}
    tour = [start]
    while left:
        tour.append(min(left, key=lambda place: (float(between[tour[-1], place]), place)))
        left.remove(tour[-1])
    return tour if last is None or last == start else [*tour, last]


def _length(between: Floats, tour: Sequence[int]) -> float:
    return sum(float(between[a, b]) for a, b in itertools.pairwise(tour))


def _reversals(tour: Sequence[int]) -> Iterator[list[int]]:
    for i, j in itertools.combinations(range(len(tour)), 2):
        yield [*tour[:i], *tour[i : j + 1][::-1], *tour[j + 1 :]]


def _join(pair_s: Floats, a: Community, b: Community) -> tuple[int, int]:
    """The devices that join two communities best."""
    return min(itertools.product(a, b), key=lambda pair: (float(pair_s[pair]), pair))


def _walk(pair_s: Floats, members: Community, entry: int | None, leave: int | None) -> Community:
    if entry is None:
        if leave is None:
            return tuple(_nearest(pair_s, members[0], among=members))
        return tuple(_nearest(pair_s, leave, among=members)[::-1])
    # Where one device has the best link on both sides it can be only one of them.
    return tuple(_nearest(pair_s, entry, last=leave if leave != entry else None, among=members))
