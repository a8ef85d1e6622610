"""`islands`: our placement. Structured starts, the best of them annealed over groups as multisets of kinds.

Where links depend on the region only, a group is how many devices of each region it has; few such groups exist, and
their costs are looked up. Where all links differ, kinds are devices, and the same search is one over devices.
"""

from __future__ import annotations

import numpy as np

from isthmus.cost.network import Floats
from isthmus.planners.placement.annealing import Annealer, Chain
from isthmus.planners.placement.grouping import StageGrouping, evaluate
from isthmus.planners.placement.landscape import Group, Landscape
from isthmus.planners.placement.path import EXACT_UP_TO, open_path
from isthmus.planners.placement.problem import Ints, PlacementProblem
from isthmus.planners.placement.structured import structured_groups

_MOST_CLASSES = 64
_QUANTILES = 4


def islands(
    problem: PlacementProblem, *, seed: int = 0, iterations: int | None = None, starts: int = 4
) -> StageGrouping:
    """The best of `starts` structured placements, each annealed for `iterations` moves.

    Without a number, 20,000 moves up to 64 devices and fewer, down to 500, for more, since a move then takes longer.
    """
    if iterations is None:
        iterations = min(20_000, max(500, 20_000 * 64 // len(problem.kind)))
    classes = _classes(problem)
    kind_of_class, compute_of_class = _class_tables(problem, classes)
    places = np.ix_(kind_of_class, kind_of_class)
    landscape = Landscape(problem.sync_s[places], problem.hop_s[places])
    annealer = Annealer(landscape, compute_of_class.tolist())
    seeds = structured_groups(problem.hop_s[places], compute_of_class, classes, problem.task.stages)
    chains = sorted((_started(annealer, landscape, classes[groups]) for groups in seeds), key=lambda c: c.total_s)
    annealed = [
        annealer.run(chain, iterations=iterations, seed=seed * starts + k) for k, chain in enumerate(chains[:starts])
    ]
    best = min(annealed, key=lambda chain: chain.total_s)
    return evaluate(problem, _devices(problem, classes, best.groups))


def _started(annealer: Annealer, landscape: Landscape, classes: Ints) -> Chain:
    groups: list[Group] = [tuple(int(c) for c in np.sort(row)) for row in classes]
    if len(groups) <= EXACT_UP_TO:
        groups = [groups[k] for k in open_path(landscape.between(groups)).order]
    return annealer.chain(groups)


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


def _devices(problem: PlacementProblem, classes: Ints, groups: list[Group]) -> Ints:
    """Device numbers for the classes of each group; the slow ones of a class go where groups are slow anyway."""
    wanted = np.array(groups)
    _, longest = _class_tables(problem, classes)
    slow_first = np.argsort(-longest[wanted].max(axis=1), kind="stable")
    found = np.zeros_like(wanted)
    order = np.lexsort((-problem.compute_s, classes))
    slots = np.argsort(wanted[slow_first], axis=None, kind="stable")
    filled = np.zeros(wanted.size, dtype=np.int64)
    filled[slots] = order
    found[slow_first] = filled.reshape(wanted.shape)
    return found
