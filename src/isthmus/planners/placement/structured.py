"""Placements that a person would try first, as starting points for annealing.

Devices are sorted into coarse clusters, each of which gets groups of its own; within them, fine clusters are spread
evenly over the groups. Coarse = one cluster spreads every fast island over all groups, so that pipelines run inside
islands; coarse = fine keeps islands whole, so that gradients stay inside; and where the coarse cluster is how fast a
device's best link is, devices without a fast link sit together and slow down as few hops as possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from isthmus.cost.kernel import Floats, Ints

_LEVELS = 8
"""Cluster counts that are tried, spread geometrically between one and all."""


def structured_groups(hop_s: Floats, compute_s: Floats, kind: Ints, groups: int) -> Iterator[Ints]:
    """Groupings [groups, devices / groups] of device numbers.

    `hop_s` [kinds, kinds] and `compute_s` [kinds] in seconds; `kind` [devices].
    """
    levels = _cluster_levels(hop_s)
    apart = hop_s.min(axis=1, initial=np.inf)
    coarse = [*levels, *_ranks(apart), *_ranks(compute_s)]
    seen: set[bytes] = set()
    for wide in coarse:
        for narrow in levels:
            found = _spread(wide[kind], narrow[kind], kind, groups)
            key = np.sort(kind[found], axis=1).tobytes()
            if key not in seen:
                seen.add(key)
                yield found


def _spread(coarse: Ints, fine: Ints, kind: Ints, groups: int) -> Ints:
    """Groups filled cluster by cluster; a cluster that does not fill whole groups shares its last one with the next."""
    size = len(kind) // groups
    order = np.lexsort((kind, fine, coarse))
    ends = np.cumsum(np.bincount(coarse))
    cuts = np.unique([0, *np.rint(ends / size).astype(np.int64), groups])
    blocks = [order[a * size : b * size] for a, b in itertools.pairwise(cuts.tolist())]
    rows: list[Ints] = []
    for block in blocks:
        block = block[np.lexsort((kind[block], fine[block]))]
        rows.append(block.reshape(size, -1).T)
    return np.concatenate(rows)


def _cluster_levels(hop_s: Floats) -> list[Ints]:
    """Average-linkage clusters of the kinds, from one cluster to one per kind: [kinds] labels for each level."""
    kinds = len(hop_s)
    if kinds == 1:
        return [np.zeros(1, dtype=np.int64)]
    between = hop_s.copy()
    np.fill_diagonal(between, 0.0)
    tree = linkage(squareform(between, checks=False), method="average")
    counts = np.unique(np.rint(np.geomspace(1, kinds, _LEVELS)).astype(np.int64))
    clusters = (fcluster(tree, t=int(count), criterion="maxclust") for count in counts)
    return [np.unique(labels, return_inverse=True)[1].astype(np.int64) for labels in clusters]


def _ranks(number: Floats) -> list[Ints]:
    """Labels that sort by the number, where it differs: by its few values, or by halves and quarters."""
    values = np.unique(number)
    if len(values) == 1:
        return []
    if len(values) <= 4:
        return [np.searchsorted(values, number).astype(np.int64)]
    ranks = np.argsort(np.argsort(number, kind="stable"), kind="stable")
    return [(ranks * parts // len(number)).astype(np.int64) for parts in (2, 4, len(number))]
