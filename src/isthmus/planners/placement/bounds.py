"""A lower bound on what any placement costs, for networks of any size: thresholds on links.

For a threshold t, let k be how many hops of the pipeline take longer than t. Hops up to t join devices of one component
of the links up to t, so groups between two longer hops all have the same number of devices in each component. Few long
hops therefore force groups to spread over components, which makes gradients slow; and fast gradients force long hops.
The bound is the least sum of both over all gradient times.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse.csgraph import connected_components

from isthmus.cost.network import Floats
from isthmus.planners.placement.mixture_bound import mixture_bound_s
from isthmus.planners.placement.problem import Ints, PlacementProblem

_MOST_THRESHOLDS = 16
_TOLERANCE = 1e-9


def lower_bound_s(problem: PlacementProblem, known_s: float) -> float:
    """No placement takes less, nor is `known_s`, the cost of one that was found, passed.

    The best of the threshold bound and, where the devices are of few kinds, the bound over mixtures of kinds.
    """
    fixed = compute_bound_s(problem)
    found = max(threshold_bound_s(problem), mixture_bound_s(problem, known_s - fixed))
    return min(found + fixed, known_s)


def compute_bound_s(problem: PlacementProblem) -> float:
    """The computation is least where devices are sorted by speed: then every group has the slowest that is left."""
    slow_first = np.sort(problem.compute_s)[::-1]
    return float(slow_first[:: problem.task.replicas].sum())


def threshold_bound_s(problem: PlacementProblem) -> float:
    """min over gradient times D of D + sum over thresholds of (step to the next) * (hops that must be longer).

    Only the communication: Eq. 2 and Eq. 4 of DT-FM.
    """
    stages = problem.task.stages
    thresholds = _thresholds(problem.hop_s)
    if stages == 1 or len(thresholds) == 0:
        return _least_sync_s(problem)
    widths = np.append(np.diff(thresholds), 0.0)
    # needed[i, k]: no gradient time below this lets only k hops take longer than threshold i.
    needed = np.array([_sync_needed(problem, float(t)) for t in thresholds])
    least = _least_sync_s(problem)
    candidates = np.unique(np.append(needed[np.isfinite(needed)], least))
    totals = [
        d + (stages - 1) * thresholds[0] + float(widths @ (needed > d + _TOLERANCE).sum(axis=1))
        for d in candidates[candidates >= least]
    ]
    return float(min(totals))


def _thresholds(hop_s: Floats) -> Floats:
    """The hop times that occur, thinned out where there are many: leaving some out weakens the bound only."""
    times = np.unique(hop_s[np.isfinite(hop_s)])
    if len(times) <= _MOST_THRESHOLDS:
        return times
    return times[np.unique(np.linspace(0, len(times) - 1, _MOST_THRESHOLDS).astype(np.int64))]


def _least_sync_s(problem: PlacementProblem) -> float:
    """Every device stands in some group: even with its best partners the worst of them takes this."""
    everywhere, devices = np.zeros(len(problem.kind_sizes), dtype=np.int64), len(problem.kind)
    return float(_partners_s(problem, everywhere, np.array([devices])).max())


def _sync_needed(problem: PlacementProblem, threshold_s: float) -> Floats:
    """[stages - 1]: for k = 0, 1, ..: the least gradient time if at most k hops are longer than the threshold.

    Then some stretch of at least stages / (k + 1) groups is alike: such a group holds no more of a component than its
    size over the stretch's length. Devices with no link up to the threshold make every hop they touch a long one.
    """
    stages, replicas, sizes = problem.task.stages, problem.task.replicas, problem.kind_sizes
    near = problem.hop_s <= threshold_s
    _, component = connected_components(near, directed=False)
    labels = component.astype(np.int64)
    component_sizes = np.bincount(labels, weights=sizes).astype(np.int64)
    alone = int(sizes[~near.any(axis=1)].sum())
    forced = min(stages - 1, -(-alone // replicas))
    stretches = -(-stages // np.arange(1, stages))
    needed = np.full(stages - 1, np.inf)
    for alike in np.unique(stretches[forced:]):
        cap = component_sizes // alike
        if cap.sum() < replicas or (alike == stages and (component_sizes % stages).any()):
            continue
        times = _partners_s(problem, labels, cap)
        order = np.argsort(times)
        # So many devices stand in the stretch; the worst of them is no better than this quantile.
        reached = np.searchsorted(np.cumsum(sizes[order]), alike * replicas)
        needed[stretches == alike] = times[order[reached]]
    needed[:forced] = np.inf
    # What at most k + 1 long hops cannot do, at most k cannot do either.
    return np.maximum.accumulate(needed[::-1])[::-1]


def _partners_s(problem: PlacementProblem, labels: Ints, cap: Ints) -> Floats:
    """[kinds]: Eq. 2's sum over the cheapest partners, no more than `cap` [components] of each component in a group.

    The device itself counts for its own component. Infinite where its component may send nobody.
    """
    sync, sizes, partners = problem.sync_s, problem.kind_sizes, problem.task.replicas - 1
    kinds = len(sizes)
    found = np.zeros(kinds)
    for kind in range(kinds):
        order = np.argsort(sync[kind], kind="stable")
        available = sizes[order] - (order == kind)
        room = cap[labels[order]] - (labels[order] == labels[kind])
        if cap[labels[kind]] < 1:
            found[kind] = np.inf
            continue
        taken = _capped(available, room, labels[order], partners)
        found[kind] = float(taken @ sync[kind][order]) if taken.sum() == partners else np.inf
    return found


def _capped(available: Ints, room: Ints, labels: Ints, partners: int) -> Ints:
    """How many of each kind are taken, in the order given, within the room of its component and `partners` in all."""
    by_label = np.argsort(labels, kind="stable")
    running = np.cumsum(available[by_label]) - available[by_label]
    starts = np.searchsorted(labels[by_label], labels[by_label])
    before = np.empty(len(available), dtype=np.int64)
    before[by_label] = running - running[starts]
    within = np.clip(room - before, 0, available)
    return np.clip(partners - (np.cumsum(within) - within), 0, within)
