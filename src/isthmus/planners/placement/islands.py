"""`islands`: our placement. Structured starts, the cheapest of them annealed together over classes of devices.

Devices of one kind and one speed are one class. Where all links differ, a class is one device.

Starts are what a person would try first. Devices are sorted into coarse clusters, each of which gets groups of its own;
within them, fine clusters are spread evenly over the groups. Coarse = one cluster spreads every fast island over all
groups, so that pipelines run inside islands; coarse = fine keeps islands whole, so that gradients stay inside; and
where the coarse cluster is how fast a device's best link is, devices without a fast link sit together and slow down as
few hops as possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from isthmus.cost.kernel import Floats, Ints
from isthmus.planners.placement.annealing import Annealer, ClassLinks
from isthmus.planners.placement.grouping import EXACT_UP_TO, Group, Landscape, StageGrouping, evaluate, open_path
from isthmus.planners.placement.problem import PlacementProblem

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
