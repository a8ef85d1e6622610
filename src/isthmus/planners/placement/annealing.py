"""Simulated annealing of many placements at once, in arrays whose last axis is the placement.

A placement is a chain of groups. A move exchanges a device of one group for a device of another, or two whole groups.
It changes the cost of two groups and of at most four hops:

    sync(C)     = max over d in C of sum over d' in C of sync_s[d, d']                        DT-FM Eq. 2
    hop(C, C')  = min over perfect matchings of the slowest pair's hop_s                      Eq. 3
    cost        = max over C of sync(C) + sum over neighbours of hop(C, C') + sum over C of the slowest computation

A maximum hides progress: a group with one slow pair costs as much as a group with three. So a part of the cost is a
mean over devices at first. It falls to nothing as the temperature falls.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.observer import stopped
from isthmus.planners.placement.grouping import bottlenecks_s

HOT, COLD = 0.1, 1e-3  # first and last temperature as shares of a group's part of the first cost
SMOOTH = 0.5  # share of the means in the first cost
WHOLE = 0.1  # share of the moves that exchange whole groups
SLOWEST = 0.3  # share of the moves that change the group of slowest gradients
SMOOTH_UNTIL = 0.9  # share of the moves that see a smoothed cost; the rest see the true cost
OFFERS = 8  # moves offered to a placement at once
ROUND = 250  # moves at one temperature. Then copies of the cheapest placements replace the dearest.
REPLACED = 8  # one placement of so many is replaced


class ClassLinks(NamedTuple):
    """Seconds between classes of devices, [classes, classes], and of a stage on each, [classes]."""

    sync_s: Floats
    hop_s: Floats
    compute_s: Floats

    @staticmethod
    def of(sync_s: Floats, hop_s: Floats, compute_s: Floats, classes: Ints) -> ClassLinks:
        """`classes` [devices]. In single precision, which is twice as fast: the search compares, `evaluate` counts."""
        alone = np.bincount(classes) == 1
        sync = sync_s.copy()
        # Such a link does not exist, and must not drown those that do.
        np.fill_diagonal(sync, np.where(alone, 0.0, sync.diagonal()))
        return ClassLinks(*(array.astype("float32") for array in (sync, hop_s, compute_s)))


class _State(NamedTuple):
    groups: Ints  # [replicas, stages, placements]
    parts: Floats  # [3, stages, placements]: slowest gradients, mean gradients and slowest computation of each group
    hops: Floats
    """[2, stages + 1, placements]: into each group, exact and as a mean; none into the first, none out of the last."""

    def of(self, placements: Ints) -> _State:
        return _State(self.groups[..., placements], self.parts[..., placements], self.hops[..., placements])

    def put(self, placements: Ints, other: _State) -> None:
        for mine, theirs in zip(self, other, strict=True):
            mine[..., placements] = theirs

    def cost_s(self, smooth: float = 0.0) -> Floats:
        """[placements]: the means count for `smooth`, the maxima for the rest."""
        slowest_s, mean_s, compute_s = self.parts
        gradients = (1 - smooth) * slowest_s.max(axis=0) + smooth * mean_s.mean(axis=0)
        exact_s, nearest_s = self.hops.sum(axis=1)
        return gradients + compute_s.sum(axis=0) + (1 - smooth) * exact_s + smooth * nearest_s


class Annealer:
    """Anneals `groups` [placements, stages, replicas] of classes of devices."""

    def __init__(self, links: ClassLinks, groups: Ints) -> None:
        self._links, (placements, self._stages, _) = links, groups.shape
        columns = np.ascontiguousarray(groups.transpose(2, 1, 0))
        hops = np.zeros((2, self._stages + 1, placements))
        for edge in range(1, self._stages):
            pairs = self._pairs(columns[:, edge - 1], columns[:, edge])
            hops[:, edge] = bottlenecks_s(pairs), _nearest(pairs)[1]
        self._state = _State(columns, self._of_groups(columns), hops)
        self.now_s = self._state.cost_s()
        self.best_s, self.best = np.inf, groups[0]
        self._keep_best(self._state)
        self._owner = np.tile(np.arange(placements), OFFERS)
        self._offer = np.arange(placements * OFFERS)

    @property
    def placements(self) -> Ints:
        """[placements, stages, replicas] as they are now."""
        return self._state.groups.transpose(2, 1, 0)

    def run(self, *, moves: int, seed: int) -> None:
        """`moves` of each placement. `best` [stages, replicas] is the cheapest met. The same seed finds the same."""
        rng = np.random.default_rng(seed)
        if self._stages == 1 or self.best_s <= 0:
            return
        hot, cooling = HOT * self.best_s / self._stages, math.log(COLD / HOT)
        for done in range(0, moves, ROUND):
            if stopped():
                return
            smooth = SMOOTH * max(0.0, 1 - done / (SMOOTH_UNTIL * moves))
            self.now_s = self._state.cost_s(smooth)
            if done:
                self._replace_dearest()
            for _ in range(min(ROUND, moves - done)):
                self._move(rng, hot * math.exp(cooling * done / moves), smooth)
        self.now_s = self._state.cost_s()

    def _of_groups(self, groups: Ints) -> Floats:
        """[3, ..] slowest gradients, mean gradients and slowest computation of `groups` [replicas, ..]."""
        sync_s = self._links.sync_s
        sums = sync_s[groups[:, None], groups].sum(axis=0) - sync_s[groups, groups]
        return np.stack((sums.max(axis=0), sums.mean(axis=0), self._links.compute_s[groups].max(axis=0)))

    def _pairs(self, first: Ints, second: Ints) -> Floats:
        """[replicas, replicas, ..]: hops between all members of two groups [replicas, ..]."""
        hop_s = self._links.hop_s
        return hop_s.ravel().take((first * len(hop_s))[:, None] + second)

    def _replace_dearest(self) -> None:
        order = np.argsort(self.now_s, kind="stable")
        count = len(order) // REPLACED
        cheapest, dearest = order[:count], order[len(order) - count :]
        self._state.put(dearest, self._state.of(cheapest))
        self.now_s[dearest] = self.now_s[cheapest]

    def _keep_best(self, state: _State) -> None:
        total_s = state.cost_s()
        cheapest = int(total_s.argmin())
        if total_s[cheapest] < self.best_s - 1e-9:
            self.best_s, self.best = float(total_s[cheapest]), state.groups[:, :, cheapest].T.copy()

    def _move(self, rng: np.random.Generator, temperature_s: float, smooth: float) -> None:
        """Several offers to each placement; the first whose cost is below a random limit is taken (Metropolis)."""
        limit_s = self.now_s[self._owner] + temperature_s * rng.exponential(size=len(self._owner))
        offered = self._state.of(self._owner)
        pair = self._exchange(offered.groups, offered.parts[0], rng)
        offered.parts[:, pair, self._offer] = self._of_groups(offered.groups[:, pair, self._offer])
        edge = np.concatenate((pair, pair + 1))
        real = (edge > 0) & (edge < self._stages)
        before, after = np.maximum(edge - 1, 0), np.minimum(edge, self._stages - 1)
        pairs = self._pairs(offered.groups[:, before, self._offer], offered.groups[:, after, self._offer])
        offered.hops[:, edge, self._offer] = np.where(real, _nearest(pairs), 0.0)
        # No matching beats the nearest devices: most offers are refused before one is looked for.
        kept = offered.cost_s(smooth) <= limit_s
        looked_for = np.nonzero(real & kept)
        offered.hops[0, edge[looked_for], looked_for[1]] = bottlenecks_s(pairs[:, :, *looked_for])
        cost_s = offered.cost_s(smooth)
        kept &= cost_s <= limit_s
        taken = kept.reshape(OFFERS, -1)
        placements = np.flatnonzero(taken.any(axis=0))
        if len(placements):
            offers = taken.argmax(axis=0)[placements] * taken.shape[1] + placements
            changed = offered.of(offers)
            self._state.put(placements, changed)
            self.now_s[placements] = cost_s[offers]
            self._keep_best(changed)

    def _exchange(self, groups: Ints, slowest_s: Floats, rng: np.random.Generator) -> Ints:
        """Exchanges devices or groups in place. Returns [2, offers]: which groups changed."""
        replicas, stages, count = groups.shape
        drawn = rng.random(count)
        first = np.where(drawn < SLOWEST, slowest_s.argmax(axis=0), rng.integers(stages, size=count))
        pair = np.stack((first, (first + rng.integers(1, stages, size=count)) % stages))
        members = np.where(drawn < 1 - WHOLE, rng.integers(replicas, size=(2, count)), -1)
        before = groups[:, pair, self._offer]
        groups[members, pair, self._offer] = before[members[::-1], [[1], [0]], self._offer]
        whole = members[0] < 0
        groups[:, pair[:, whole], self._offer[whole]] = before[:, ::-1, whole]
        return pair


def _nearest(pairs: Floats) -> Floats:
    """[2, ..]: each device's nearest of the other group: the slowest of these, and their mean."""
    rows, columns = pairs.min(axis=0), pairs.min(axis=1)
    return np.stack((np.maximum(rows.max(axis=0), columns.max(axis=0)), (rows + columns).mean(axis=0) / 2))
