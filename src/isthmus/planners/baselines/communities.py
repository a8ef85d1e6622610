"""Devices that are well joined, and the order in which a pipeline passes through them.

Communities are Louvain's on the bandwidth graph (FusionLLM, section 4). A pipeline then visits one community after
another and leaves each only once:

    first community        second             third
    a ─ b ─ c ─ d   ──►    e ─ f ─ g   ──►    h ─ i
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import networkx as nx
import numpy as np
from networkx.algorithms.community import louvain_communities

from isthmus.cost.network import FleetNetwork, Floats
from isthmus.planners.placement.path import open_path
from isthmus.planners.search.local_search import nearest_tour, two_opt

Community = tuple[int, ...]
SEED = 0
"""Louvain visits devices in random order."""


def communities(network: FleetNetwork) -> list[Community]:
    """Louvain communities of the graph whose weights are the mean bandwidth of both directions, in fleet order."""
    bandwidth = np.divide(1.0, network.byte_s, out=np.zeros_like(network.byte_s), where=network.byte_s > 0)
    graph = nx.from_numpy_array((bandwidth + bandwidth.T) / 2)
    found = louvain_communities(graph, weight="weight", seed=SEED)
    return sorted(tuple(sorted(int(device) for device in members)) for members in found)


def visiting_order(pair_s: Floats, groups: Sequence[Community]) -> list[Community]:
    """Each community as the order of its devices, one community after another.

    `pair_s[i, j]` are the seconds of a typical message from device i to j and back. Communities follow so that the best
    links between neighbours are short in sum. Devices follow by nearest neighbour, then reversals inside a community
    shorten the whole way: where a community is entered and left is part of it.
    """
    pair_s = (pair_s + pair_s.T) / 2
    between = np.array([[float(pair_s[np.ix_(a, b)].min()) for b in groups] for a in groups])
    tour: list[int] = []
    ordered = [groups[k] for k in open_path(between).order]
    for members in ordered:
        start = min(members, key=lambda device: float(pair_s[tour[-1], device])) if tour else members[0]
        tour += nearest_tour(pair_s, start, members)
    ends = list(itertools.accumulate((len(members) for members in ordered), initial=0))
    tour = two_opt(pair_s, tour, list(itertools.pairwise(ends)))
    return [tuple(tour[a:b]) for a, b in itertools.pairwise(ends)]
