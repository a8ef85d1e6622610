"""Sky Computing's allocations (section IV): even, the heuristic and the optimum; and FusionLLM's of equal compute.

The heuristic (section IV-D, Algorithms 1 and 2) moves boundaries between neighbours. Where the text is silent the
authors' public `allocator.py` decides: boundaries are visited in order, a layer moves at once, and the target is the
mean at the start of a sweep. We leave its slip: there "the next device is below the target" looks at the device itself,
so that no layer is ever given away; here it looks at the next device, as the text says.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
from scipy.sparse import csr_matrix, vstack

from isthmus.cost.kernel import Floats, Ints
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation, too_small
from isthmus.planners.highs import integer_programme
from isthmus.planners.observer import looked_at

MOST_SWEEPS = 1_000  # the default of the public code
MOST_CELLS = 20_000  # devices x layers up to which the programme is written down at all
ROUNDING = 1e-9  # a bound must hold by this share, so that rounding cannot make one
SAFETY = 1e-6  # HiGHS keeps rows to an absolute 1e-6 of a scaled programme: its bound is trusted to this share


def best_in_order(problem: LayerProblem) -> Allocation:
    """The best of the three. Raises the last refusal where none fits."""
    found: list[Allocation] = []
    refused: list[FleetTooSmall] = []
    for make in (even_layers, equal_compute_layers, sky_heuristic_layers):
        try:
            found.append(make(problem))
        except FleetTooSmall as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    return min(found, key=lambda a: a.workload_s)


def even_layers(problem: LayerProblem) -> Allocation:
    """Sky Computing's baseline (section IV-A): the same number of layers on every device, the larger counts first.

    With more devices than layers the last get none. Knows neither speed nor memory, as in the paper. Raises
    FleetTooSmall where a device cannot hold its share.
    """
    return allocation(problem, range(problem.devices), even_counts(problem))


def even_counts(problem: LayerProblem) -> list[int]:
    share, left = divmod(problem.layers, problem.devices)
    return [share + (device < left) for device in range(problem.devices)]


def equal_compute_layers(problem: LayerProblem) -> Allocation:
    """FusionLLM's baseline: boundary k is the place nearest to the first k devices' share of the FLOPs.

    A device may get nothing. Knows no memory, latency or transfer. Raises FleetTooSmall where a device cannot hold
    its share.
    """
    speed = np.cumsum(1.0 / problem.device_s_per_flop)
    wanted = problem.flops_before[-1] * speed[:-1] / speed[-1]
    after = np.searchsorted(problem.flops_before, wanted)
    before = np.maximum(after - 1, 0)
    nearer = wanted - problem.flops_before[before] < problem.flops_before[after] - wanted
    boundaries = np.concatenate(([0], np.where(nearer, before, after), [problem.layers]))
    return allocation(problem, range(problem.devices), np.diff(boundaries).tolist())


def sky_heuristic_layers(problem: LayerProblem) -> Allocation:
    """Coarse allocation until memory holds, then fine-tuning towards the mean workload, in the order given.

    Steers by the paper's literal workload `dt_i * lf_j + ct_i` per layer. Every device keeps one layer at least; with
    more devices than layers the last ones get none. Raises FleetTooSmall where no move repairs the memory.
    """
    cut = list(itertools.accumulate(even_counts(problem), initial=0))
    cut = cut[: min(problem.devices, problem.layers) + 1]
    coarse(problem, cut)
    fine(problem, cut)
    counts = [end - start for start, end in itertools.pairwise(cut)]
    return allocation(problem, range(len(counts)), counts)


def coarse(problem: LayerProblem, cut: list[int]) -> None:
    """Algorithm 1, in place: a device over its memory gives layers to the next, one with room takes from it."""
    devices = len(cut) - 1
    crowded = {d for d in range(devices) if not problem.fits(d, cut[d], cut[d + 1])}

    def move(boundary: int, step: int) -> None:
        cut[boundary] += step
        for d in (boundary - 1, boundary):
            (crowded.discard if problem.fits(d, cut[d], cut[d + 1]) else crowded.add)(d)

    for _ in range(MOST_SWEEPS):
        looked_at()
        before = cut[:]
        for d in range(devices - 1):
            while crowded and d in crowded and cut[d + 1] - cut[d] > 1:
                move(d + 1, -1)
            while crowded and cut[d + 2] - cut[d + 1] > 1 and problem.fits(d, cut[d], cut[d + 1] + 1):
                move(d + 1, +1)
        if not crowded:
            return
        if cut == before:
            break
    d = min(crowded)
    raise too_small(problem, d, cut[d], cut[d + 1])


def fine(problem: LayerProblem, cut: list[int]) -> None:
    """Algorithm 2, in place."""
    flops, devices = problem.flops_before.tolist(), len(cut) - 1
    pace, latency = problem.device_s_per_flop.tolist(), problem.device_latency_s.tolist()

    def load(d: int, start: int, end: int) -> float:
        return pace[d] * (flops[end] - flops[start]) + latency[d] * (end - start)

    for _ in range(MOST_SWEEPS):
        looked_at()
        before = cut[:]
        target = sum(load(d, cut[d], cut[d + 1]) for d in range(devices)) / devices
        for d in range(devices - 1):
            start, end, next_end = cut[d : d + 3]
            if load(d, start, end) < target:
                if next_end - end > 1 and problem.fits(d, start, end + 1):
                    cut[d + 1] += 1
            elif (
                end - start > 1
                and load(d + 1, end, next_end) < target < load(d, start, end - 1)
                and problem.fits(d + 1, end - 1, next_end)
            ):
                cut[d + 1] -= 1
        if cut == before:
            return


def sky_optimal_layers(problem: LayerProblem) -> Allocation:
    """Section IV-C: the best allocation that HiGHS finds within its work limit, and its bound.

    The paper's programme says which device holds which layer and bounds first and last layer by large constants. Here
    a device has *started* by layer j (S_dj) and has *ended* before it (E_dj), both 0 or 1 and never falling, and holds
    the layers in between: the same allocations, but runs are contiguous by construction and the relaxation is tighter.
    The order of the devices is free and a device may stay empty, as in the paper.

        minimise T    sum_d (S_dj - E_dj) = 1    E_dj <= S_dj    S, E rise with j
        s_d sum_j lf_j (S_dj - E_dj) + ct_d S_dL + received <= T      (with transfers: each of the two alone)
        S_dj <= E_d,reach(j)      a device that starts by j ends where its memory, or the time to beat, is full

    scipy cannot hand HiGHS a known allocation to start from, so the best simple one enters as that time to be beaten.
    Where it finds none, or none better, the best simple allocation stands; its gap is to HiGHS's bound. Raises
    FleetTooSmall where the programme has no solution, or nothing was found that fits.
    """
    scale_s = pooled_bound_s(problem) or 1.0
    known: Allocation | None = None
    with contextlib.suppress(FleetTooSmall):
        known = best_in_order(problem)
    limit_s = known.workload_s if known else np.inf
    if problem.devices * problem.layers > MOST_CELLS:
        if known is None:
            raise FleetTooSmall("sky-optimal: the problem is too large to write down, and no simple allocation fits")
        return allocation(problem, known.order, known.counts, pooled_bound_s(problem))
    cost, rows = _programme(problem, scale_s, limit_s)
    found = integer_programme(cost, rows, (cost == 0).astype(np.int64))
    bound_s = pooled_bound_s(problem)
    if found.status == 2 and known is None:
        raise FleetTooSmall("sky-optimal: no order of the devices holds the layers")
    if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
        bound_s = max(bound_s, found.mip_dual_bound * scale_s * (1 - SAFETY))
    offers = [known] if known else []
    if found.x is not None:
        offers.append(_read(problem, found.x))
    if not offers:
        raise FleetTooSmall("sky-optimal: found nothing that fits within its work limit")
    best = min(offers, key=lambda a: a.workload_s)
    return allocation(problem, best.order, best.counts, bound_s)


def reach(problem: LayerProblem, limit_s: float) -> Ints:
    """[devices, layers]: the furthest end within memory and `limit_s`; the start itself where none is."""
    devices, starts = np.arange(problem.devices), np.arange(problem.layers)[None, :]
    received, memory_ends = problem.received_table_s, problem.memory_end_table
    seconds = limit_s - received if problem.transfers is None else np.where(received <= limit_s, limit_s, -1.0)
    done = problem.flops_before[:-1] + seconds / problem.device_s_per_flop[devices, None]
    # One layer too far for the sake of rounding, and back where the workload is really above.
    ends = np.searchsorted(problem.flops_before, done * (1 + 1e-12), side="right") - 1
    ends = np.maximum(np.minimum(ends, memory_ends), starts)
    while (over := problem.workload_s(devices[:, None], starts, ends) > limit_s).any():
        ends -= over
    return ends


def pooled_bound_s(problem: LayerProblem) -> float:
    """All FLOPs on all devices at once, no layer whole and nothing received."""
    return float(problem.flops_before[-1] / (1.0 / problem.device_s_per_flop).sum()) * (1 - ROUNDING)


def _programme(
    problem: LayerProblem, scale_s: float, limit_s: float
) -> tuple[Floats, tuple[csr_matrix, Floats, Floats]]:
    """The cost of each variable, and the rows with their least and most.

    Variables: S [devices x layers], E [devices x layers], T in units of the scale; T alone has a cost.
    """
    cells = problem.devices * problem.layers
    started = np.arange(cells).reshape(problem.devices, problem.layers)
    ended = started + cells
    cost = np.zeros(2 * cells + 1)
    cost[-1] = 1.0
    first = vstack(
        [
            _rows(len(cost), (started.T, 1.0), (ended.T, -1.0)),
            _rows(len(cost), (started[:, -1:], 1.0)),
        ]
    )
    below = vstack(
        [
            _rows(len(cost), (ended.reshape(-1, 1), 1.0), (started.reshape(-1, 1), -1.0)),
            *(
                _rows(len(cost), (v[:, :-1].reshape(-1, 1), 1.0), (v[:, 1:].reshape(-1, 1), -1.0))
                for v in (started, ended)
            ),
            *_ends(problem, started, ended, limit_s),
            *_workload(problem, started, ended, scale_s),
        ]
    )
    matrix = csr_matrix(vstack([first, below]))
    # One device for each layer, one start at most for each device; all other rows are of differences.
    heads = [problem.layers, problem.devices, matrix.indptr.size - 1 - problem.layers - problem.devices]
    return cost, (matrix, np.repeat([1.0, 0.0, -np.inf], heads), np.repeat([1.0, 1.0, 0.0], heads))


def _ends(problem: LayerProblem, started: Ints, ended: Ints, limit_s: float) -> list[csr_matrix]:
    """A run ends where it is full. Where a later start is full earlier, that start is bounded by itself."""
    width = 2 * started.size + 1
    ends = reach(problem, limit_s) if np.isfinite(limit_s) else problem.memory_end_table
    furthest = np.maximum.accumulate(ends, axis=1)
    device, layer = np.nonzero(furthest < problem.layers)
    rows = [_rows(width, (started[device, layer, None], 1.0), (ended[device, furthest[device, layer], None], -1.0))]
    device, layer = np.nonzero(ends[:, 1:] < furthest[:, 1:])
    if len(device):
        rows.append(
            _rows(
                width,
                (started[device, layer + 1, None], 1.0),
                (started[device, layer, None], -1.0),
                (ended[device, ends[device, layer + 1], None], -1.0),
            )
        )
    return rows


def _workload(problem: LayerProblem, started: Ints, ended: Ints, scale_s: float) -> list[csr_matrix]:
    """One row for each device, or two where what it receives overlaps its compute."""
    width = 2 * started.size + 1
    compute = problem.device_s_per_flop[:, None] * problem.layer_flops / scale_s
    received = problem.received_table_s / scale_s
    # What S_j - S_j-1 costs at layer j, collected by S_j.
    at_start = received - np.column_stack((received[:, 1:], np.zeros(problem.devices)))
    largest = np.full((problem.devices, 1), width - 1)
    if problem.transfers is not None:
        return [
            _rows(width, (started, compute), (ended, -compute), (largest, -1.0)),
            _rows(width, (started, at_start), (largest, -1.0)),
        ]
    return [_rows(width, (started, compute + at_start), (ended, -compute), (largest, -1.0))]


def _rows(width: int, *blocks: tuple[Ints, float | Floats]) -> csr_matrix:
    """Row r holds, for each term, its value in the columns term[r]."""
    height = blocks[0][0].shape[0]
    rows = np.concatenate([np.repeat(np.arange(height), columns.shape[1]) for columns, _ in blocks])
    columns = np.concatenate([columns.ravel() for columns, _ in blocks])
    values = np.concatenate([np.broadcast_to(value, columns.shape).ravel() for columns, value in blocks])
    return csr_matrix((values, (rows, columns)), shape=(height, width))


def _read(problem: LayerProblem, solution: Floats) -> Allocation:
    started, ended = solution[:-1].reshape(2, problem.devices, problem.layers)
    holds = started - ended > 0.5
    counts = holds.sum(axis=1)
    order = np.lexsort((counts, holds.argmax(axis=1)))
    order = order[counts[order] > 0]
    return allocation(problem, order.tolist(), counts[order].tolist())
