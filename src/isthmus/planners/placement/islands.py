"""`islands`: our placement. Structured starts, the cheapest of them annealed together over classes of devices.

Devices of one kind and one speed are one class. Where all links differ, a class is one device.

Starts are what a person would try first. Devices are sorted into coarse clusters, each of which gets groups of its own;
within them, fine clusters are spread evenly over the groups. Coarse = one cluster spreads every fast island over all
groups, so that pipelines run inside islands; coarse = fine keeps islands whole, so that gradients stay inside; and
where the coarse cluster is how fast a device's best link is, devices without a fast link sit together and slow down as
few hops as possible.

Simulated annealing of many placements at once, in arrays whose last axis is the placement.

A placement is a chain of groups. A move exchanges a device of one group for a device of another, or two whole groups.
It changes the cost of two groups and of at most four hops:

    sync(C)     = max over d in C of sum over d' in C of sync_s[d, d']                        DT-FM Eq. 2
    hop(C, C')  = min over perfect matchings of the slowest pair's hop_s                      Eq. 3
    cost        = max over C of sync(C) + sum over neighbours of hop(C, C') + sum over C of the slowest computation

A maximum hides progress: a group with one slow pair costs as much as a group with three. So a part of the cost is a
mean over devices at first. It falls to nothing as the temperature falls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.observer import stopped
from isthmus.planners.placement.grouping import (
    EXACT_UP_TO,
    Group,
    Landscape,
    StageGrouping,
    bottlenecks_s,
    evaluate,
    open_path,
)
from isthmus.planners.placement.problem import PlacementProblem

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


PLACEMENTS, MOVES, MOVES_OF_CLASS = 8, 10_000, 150
_MOST_CLASSES = 64
_QUANTILES = 4
_LEVELS = 8  # cluster counts that are tried, spread geometrically between one and all


def islands(
    problem: PlacementProblem, *, seed: int = 0, moves: int | None = None, placements: int | None = None
) -> StageGrouping:
    """The best of `placements` structured starts that are annealed together for `moves` moves each.

    Without numbers, 8 placements, and 150 moves for each class of devices, from 500 to 10,000; fewer of both where a
    group has more than 15 devices.
    """
    classes = _classes(problem)
    crowd = max(1, problem.task.replicas // 8)
    if placements is None:
        placements = max(1, PLACEMENTS // crowd)
    if moves is None:
        moves = min(MOVES, max(500, MOVES_OF_CLASS * (int(classes.max()) + 1))) // crowd**2
    kind_of_class, compute_of_class = _class_tables(problem, classes)
    places = np.ix_(kind_of_class, kind_of_class)
    links = ClassLinks.of(problem.sync_s[places], problem.hop_s[places], compute_of_class, classes)
    starts = np.array([*structured_groups(problem.hop_s[places], compute_of_class, classes, problem.task.stages)])
    annealer = Annealer(links, _cheapest(links, classes[starts], placements))
    annealer.run(moves=moves, seed=seed)
    return evaluate(problem, _devices(problem, classes, annealer.best))


def _cheapest(links: ClassLinks, starts: Ints, count: int) -> Ints:
    """[count, stages, replicas]: the cheapest starts in their best order, the first again where there are fewer."""
    landscape = Landscape(links.sync_s, links.hop_s)
    costs = np.array([_ordered_s(landscape, start) for start in starts])
    costs += links.compute_s[starts].max(axis=2).sum(axis=1)
    return starts[np.resize(np.argsort(costs, kind="stable")[:count], count)]


def _ordered_s(landscape: Landscape, start: Ints) -> float:
    """Gradients and hops, after the groups were put in their best order in place."""
    groups: list[Group] = [tuple(np.sort(row).tolist()) for row in start]
    if len(groups) <= EXACT_UP_TO:
        order = open_path(landscape.between(groups))
        start[:], groups = start[order], [groups[k] for k in order]
    return max(map(landscape.group_s, groups)) + sum(itertools.starmap(landscape.hop_s, itertools.pairwise(groups)))


def _classes(problem: PlacementProblem) -> Ints:
    """[devices]: number of (kind, computation). With many speeds, those of a quarter of the devices count as one."""
    compute, kinds = problem.compute_s, len(problem.kind_sizes)
    exact = _numbered(problem.kind, compute)
    if exact.max() < max(_MOST_CLASSES, 2 * kinds):
        return exact
    cuts = np.quantile(compute, np.arange(1, _QUANTILES) / _QUANTILES)
    return _numbered(problem.kind, np.searchsorted(cuts, compute))


def _numbered(kind: Ints, level: Ints | Floats) -> Ints:
    pairs = np.stack((kind.astype(np.float64), level), axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _class_tables(problem: PlacementProblem, classes: Ints) -> tuple[Ints, Floats]:
    """[classes]: the kind of each, and the longest computation of its devices."""
    count = int(classes.max()) + 1
    kind = np.zeros(count, dtype=np.int64)
    kind[classes] = problem.kind
    compute = np.zeros(count)
    np.maximum.at(compute, classes, problem.compute_s)
    return kind, compute


def _devices(problem: PlacementProblem, classes: Ints, wanted: Ints) -> Ints:
    """Device numbers for the classes of each group; the slow ones of a class go where groups are slow anyway."""
    _, longest = _class_tables(problem, classes)
    slow_first = np.argsort(-longest[wanted].max(axis=1), kind="stable")
    found = np.zeros_like(wanted)
    order = np.lexsort((-problem.compute_s, classes))
    slots = np.argsort(wanted[slow_first], axis=None, kind="stable")
    filled = np.zeros(wanted.size, dtype=np.int64)
    filled[slots] = order
    found[slow_first] = filled.reshape(wanted.shape)
    return found


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
