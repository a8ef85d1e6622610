"""Mixtures: counts of devices per kind in a group, and how many hops of a pipeline must be long.

With gradients in D seconds only some mixtures are allowed. For a threshold t, mixtures between which hops up to t are
possible form classes. A pipeline that uses c classes has at least c - 1 hops longer than t, and a class fills no more
groups than its scarcest kinds allow; so a small linear programme bounds c from below. Eq. 4 is at least the sum of
the hops counted at each threshold.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse.csgraph import connected_components

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.highs import stdout_to_stderr
from isthmus.planners.placement.few_mixtures import Allowed
from isthmus.planners.placement.problem import PlacementProblem

MOST_PAIRED = 700
"""Up to so many mixtures every pair is looked at (Hall's condition); beyond, classes are those of equal components."""
_TOLERANCE = 1e-9


def count_mixtures(sizes: Ints, members: int) -> int:
    """How many different groups of `members` devices there are, by kind."""
    ways = [1, *([0] * members)]
    for size in sizes.tolist():
        ways = [sum(ways[max(0, m - size) : m + 1]) for m in range(members + 1)]
    return ways[members]


def mixtures(sizes: Ints, members: int) -> Ints:
    """[mixtures, kinds]: all of them."""
    partial = np.zeros((1, 0), dtype=np.int64)
    for kind, size in enumerate(sizes.tolist()):
        rest = int(sizes[kind + 1 :].sum())
        grown = [np.column_stack((partial, np.full(len(partial), count))) for count in range(min(size, members) + 1)]
        partial = np.concatenate(grown)
        left = members - partial.sum(axis=1)
        partial = partial[(left >= 0) & (left <= rest)]
    return partial


class _Level(NamedTuple):
    """Hops longer than one threshold."""

    width_s: float
    """To the next threshold."""
    fewest: float
    """Classes that a pipeline needs."""
    apart: bool
    """Whether every mixture is a class of its own."""


class MixtureTables:
    """All mixtures of a problem, what their gradients take, and a bound on the pipeline for each time allowed."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.sizes, self.stages = problem.kind_sizes, problem.task.stages
        self._mixtures = mixtures(self.sizes, problem.task.replicas)
        exchanged = self._mixtures @ problem.sync_s - problem.sync_s.diagonal()
        self.sync_s: Floats = np.where(self._mixtures > 0, exchanged, 0.0).max(axis=1)
        """[mixtures]: Eq. 2."""
        self._hop_s = problem.hop_s
        self._thresholds: Floats = np.unique(self._hop_s[np.isfinite(self._hop_s)])
        self.least_pipeline_s = (self.stages - 1) * float(self._thresholds[0]) if self.stages > 1 else 0.0
        # [sets, kinds]: every set of kinds but the empty one.
        self._levels: dict[int, list[_Level]] = {}
        sets = np.arange(1, 1 << len(self.sizes))
        self._sets: Ints = (sets[:, None] >> np.arange(len(self.sizes))) & 1

    def count(self, sync_s: float) -> int:
        """Mixtures with gradients in `sync_s`."""
        return int((self.sync_s <= sync_s + _TOLERANCE).sum())

    def allowed(self, sync_s: float) -> Allowed:
        """The mixtures with gradients in `sync_s`, and the hops between them."""
        chosen = self.sync_s <= sync_s + _TOLERANCE
        mixtures = self._mixtures[chosen]
        of_sets = (mixtures @ self._sets.T).astype(np.int16)

        def hops_s(pairs: Ints) -> Floats:
            found = np.full(len(pairs), np.inf)
            for threshold in self._thresholds[::-1].tolist():
                reached = self._reached(mixtures, self._hop_s <= threshold)
                found[(of_sets[pairs[:, 0]] <= reached[pairs[:, 1]]).all(axis=1)] = threshold
            return np.where(pairs[:, 0] == pairs[:, 1], self._thresholds[0], found)

        return Allowed(mixtures, self.sync_s[chosen], hops_s, float(self._thresholds[0]))

    def pipeline_s(self, sync_s: float, at_least: int = 1) -> float:
        """The least of Eq. 4 with gradients in `sync_s` and `at_least` so many different mixtures; infinite if none."""
        count = self.count(sync_s)
        if count not in self._levels:
            self._levels[count] = self._levels_of(self._mixtures[self.sync_s <= sync_s + _TOLERANCE])
        total = self.least_pipeline_s
        for level in self._levels[count]:
            # Where every mixture is a class of its own, so many mixtures are so many classes.
            fewest = max(level.fewest, at_least) if level.apart else level.fewest
            total += (min(fewest, self.stages) - 1) * level.width_s
        return total

    def _levels_of(self, allowed: Ints) -> list[_Level]:
        of_sets = allowed @ self._sets.T
        levels: list[_Level] = []
        solved: dict[bytes, float] = {}
        for threshold, following in itertools.pairwise(self._thresholds.tolist()):
            classes = self._classes(allowed, of_sets, threshold)
            key = classes.tobytes()
            if key not in solved:
                solved[key] = self._fewest_classes(allowed, of_sets, classes)
            if math.isinf(solved[key]):
                return [_Level(math.inf, 2, False)]
            apart = int(classes.max()) + 1 + int((classes < 0).sum()) == len(allowed)
            levels.append(_Level(following - threshold, solved[key], apart))
            if not classes.any():
                break
        return levels

    def _classes(self, allowed: Ints, of_sets: Ints, threshold_s: float) -> Ints:
        """[allowed]: mixtures with different labels are not joined by hops up to the threshold, directly or by others.

        A mixture that cannot hop to any, itself included, has a negative label: each group of it stands alone.
        """
        near = self._hop_s <= threshold_s
        if len(allowed) > MOST_PAIRED:
            return _same_components(allowed, near)
        joined = self._joined(allowed, of_sets, near)
        _, labels = connected_components(joined, directed=False)
        return _numbered_or_alone(labels.astype(np.int64), np.count_nonzero(joined, axis=1) == 0)

    def _joined(self, allowed: Ints, of_sets: Ints, near: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[allowed, allowed]: whether all pairs of a perfect matching can be near.

        Hall: they can unless some set of kinds outnumbers its neighbours.
        """
        reached = self._reached(allowed, near)
        return np.array([(mine <= reached).all(axis=1) for mine in of_sets.astype(np.int16)])

    def _reached(self, mixtures: Ints, near: NDArray[np.bool_]) -> NDArray[np.int16]:
        """[mixtures, sets of kinds]: devices of each mixture that are near to some kind of the set."""
        neighbours = (self._sets @ near.astype(np.int64)) > 0
        return (mixtures @ neighbours.T).astype(np.int16)

    def _fewest_classes(self, allowed: Ints, of_sets: Ints, classes: Ints) -> float:
        """A linear programme: each mixture that is used takes its share of its class, and all devices are used."""
        most = np.ones(len(allowed))
        held = np.full((int(classes.max()) + 1, of_sets.shape[1]), np.iinfo(np.int64).max)
        together = classes >= 0
        np.minimum.at(held, classes[together], of_sets[together])
        available = self._sets @ self.sizes
        fill = np.where(held > 0, available // np.maximum(held, 1), self.stages).min(axis=1, initial=self.stages)
        most[together] = np.maximum(fill[classes[together]], 1)
        with stdout_to_stderr():
            solved = linprog(1.0 / most, A_eq=allowed.T, b_eq=self.sizes, method="highs")
        if solved.status == 2:
            return math.inf
        return float(math.ceil(solved.fun - 1e-6)) if solved.status == 0 else 1.0


def _same_components(allowed: Ints, near: NDArray[np.bool_]) -> Ints:
    """Labels by devices per component of the kinds' graph; negative where a device has no link that near."""
    count, component = connected_components(near, directed=False)
    totals = np.zeros((len(allowed), count), dtype=np.int64)
    np.add.at(totals.T, component, allowed.T)
    labels = np.unique(totals, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return _numbered_or_alone(labels, allowed[:, ~near.any(axis=1)].sum(axis=1) > 0)


def _numbered_or_alone(labels: Ints, alone: NDArray[np.bool_]) -> Ints:
    """The labels numbered from 0 without gaps, -1 for those that stand alone."""
    numbered = np.full(len(labels), -1, dtype=np.int64)
    numbered[~alone] = np.unique(labels[~alone], return_inverse=True)[1].reshape(-1)
    return numbered
