"""Sky Computing's optimal allocation (section IV-C): a mixed-integer programme, solved as far as a work limit allows.

The paper's programme says which device holds which layer and bounds first and last layer by large constants. Here a
device has *started* by layer j (S_dj) and has *ended* before it (E_dj), both 0 or 1 and never falling, and holds the
layers in between: the same allocations, but runs are contiguous by construction and the relaxation is tighter. The
order of the devices is free and a device may stay empty, as in the paper.

    minimise T    sum_d (S_dj - E_dj) = 1    E_dj <= S_dj    S, E rise with j
    s_d sum_j lf_j (S_dj - E_dj) + ct_d S_dL + received <= T          (overlapping: each of the two alone)
    S_dj <= E_d,reach(j)      a device that starts by j ends where its memory, or the time to beat, is full

scipy cannot hand HiGHS a known allocation to start from, so the best simple one enters as that time to be beaten.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, vstack

from isthmus.cost.kernel import Floats, Ints
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.in_order import best_in_order
from isthmus.planners.baselines.allocation.prices import pooled_bound_s
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation
from isthmus.planners.baselines.allocation.windows import reach
from isthmus.planners.highs import integer_programme

MOST_CELLS = 20_000
"""Devices x layers up to which the programme is written down at all."""
SAFETY = 1e-6
"""HiGHS keeps rows to an absolute 1e-6 of a scaled programme: its bound is trusted to this share."""


def sky_optimal_layers(problem: LayerProblem) -> Allocation:
    """The best allocation that HiGHS finds within its work limit, and its bound.

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
    programme = _programme(problem, scale_s, limit_s)
    found = integer_programme(
        programme.cost, (programme.matrix, programme.least, programme.most), (programme.cost == 0).astype(np.int64)
    )
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


class _Programme(NamedTuple):
    """Variables: S [devices x layers], E [devices x layers], T in units of the scale; T alone has a cost."""

    cost: Floats
    matrix: csr_matrix
    least: Floats
    most: Floats


def _programme(problem: LayerProblem, scale_s: float, limit_s: float) -> _Programme:
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
    return _Programme(cost, matrix, np.repeat([1.0, 0.0, -np.inf], heads), np.repeat([1.0, 1.0, 0.0], heads))


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
    if problem.transfers is not None and problem.transfers.overlaps:
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
