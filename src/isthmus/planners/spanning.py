"""What joining so many devices costs at least: they must form a tree, or a forest where some receive nothing.

Below a threshold t the devices fall into components of edges lighter than t. Joining k devices into f trees takes at
least c - f edges of weight t or more, where c is the least number of components that have k devices together. An edge
of weight w is the sum of the steps between thresholds up to w, so

    weight >= sum over thresholds of (t_i - t_(i-1)) * max(0, c_i(k) - f)

A site's devices are near to each other: that counts every way out of a site, which the k - 1 lightest edges do not.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

from isthmus.cost.network import FleetNetwork, Floats, Ints

MOST_SPANNED = 512
"""Devices up to which thresholds are looked at; beyond, each device has its nearest neighbour."""


class Spanning:
    """The thresholds of one symmetric weight between kinds of devices, above 0 after a shift that is taken back."""

    def __init__(self, network: FleetNetwork, kind_weight: Floats) -> None:
        either = np.minimum(kind_weight, kind_weight.T)
        self.count = len(network.names)
        if self.count > MOST_SPANNED or self.count == 1:
            finite = either[np.isfinite(either)]
            nearest = np.sort(either.min(axis=1)[network.kind])[: self.count - 1] if len(finite) else np.zeros(0)
            self._nearest: Floats | None = np.concatenate([[0.0], np.cumsum(nearest)])
            self._largest = np.concatenate([[0.0], np.maximum.accumulate(nearest)])
            return
        self._nearest = None
        # Shifted, because scipy takes a weight of zero for a missing edge.
        tree = minimum_spanning_tree(np.triu(either[np.ix_(network.kind, network.kind)] + 1.0, 1)).tocoo()
        # Not the tree's own weights: seconds per byte are far below one, and the shift costs them their digits.
        weight = either[network.kind[tree.row], network.kind[tree.col]]
        self._thresholds = np.unique(weight)
        self._needed = [self._components(tree.row, tree.col, weight < t) for t in self._thresholds]

    def _components(self, row: Ints, col: Ints, lighter: NDArray[np.bool_]) -> Floats:
        """[k]: how many of the largest components have k devices together, for k = 0 .. all."""
        edges = coo_array((np.ones(int(lighter.sum())), (row[lighter], col[lighter])), shape=(self.count, self.count))
        _, label = connected_components(edges, directed=False)
        together = np.cumsum(np.sort(np.bincount(label))[::-1])
        return (np.searchsorted(together, np.arange(self.count + 1)) + 1).astype(np.float64)

    def sums(self, trees: int) -> Floats:
        """[k - 1]: the least total weight of k devices in at most `trees` trees, for k = 1 .. all."""
        sizes = np.arange(1, self.count + 1)
        if self._nearest is not None:
            return self._nearest[np.maximum(sizes - trees, 0)]
        total = np.zeros(self.count)
        for (before, threshold), needed in zip(itertools.pairwise([0.0, *self._thresholds]), self._needed, strict=True):
            total += (threshold - before) * np.maximum(needed[1:] - trees, 0.0)
        return total

    def largest(self) -> Floats:
        """[k - 1]: the least weight of the heaviest edge of a tree of k devices, for k = 1 .. all."""
        if self._nearest is not None:
            return self._largest
        found = np.zeros(self.count)
        for threshold, needed in zip(self._thresholds, self._needed, strict=True):
            found = np.where(needed[1:] > 1, threshold, found)
        return found
