"""An order of devices whose maximal windows, one after the other, reach the end: a beam search that prices guide.

Every device that is placed loses something against its dearest window. All losses together may not exceed the budget
that the limit leaves: the sum of the dearest windows less the price of all layers. States that used the same devices
differ only in how far they came, so the furthest one stands for all.
"""

from __future__ import annotations

import numpy as np

from isthmus.cost.network import Floats
from isthmus.planners.baselines.allocation.problem import Ints, LayerProblem
from isthmus.planners.baselines.allocation.windows import reach
from isthmus.planners.observer import looked_at

MOST_STATES = 300
MOST_EXPANDED = 4_000_000
"""States x devices x devices of one search: it is narrower where there are more devices."""


def pack(problem: LayerProblem, prices: Floats, limit_s: float, seed: int = 0) -> list[int] | None:
    """Devices in an order that reaches the end within the limit, or None where the beam lost all its states."""
    ends = reach(problem, limit_s)
    before = np.concatenate(([0.0], np.cumsum(prices)))
    dearest = (before[ends] - before[:-1]).max(axis=1)
    budget = float(dearest.sum() - before[-1]) + 1e-9 * float(before[-1])
    width = max(1, min(MOST_STATES, MOST_EXPANDED // problem.devices**2))
    names = np.random.default_rng(seed).integers(1, 1 << 62, problem.devices)
    position, used = np.zeros(1, dtype=np.int64), np.zeros((1, problem.devices), dtype=bool)
    key = np.zeros(1, dtype=np.int64)
    chosen = np.zeros((1, 0), dtype=np.int64)
    for _ in range(problem.devices):
        looked_at(len(position))
        after = ends[:, position].T
        after[used] = 0
        done = np.argwhere(after == problem.layers)
        if len(done):
            return [*chosen[done[0, 0]].tolist(), int(done[0, 1])]
        # What the devices used could have earned at best, less what they did earn: the price of all layers so far.
        lost = (used @ dearest)[:, None] + dearest - before[after]
        state, device = np.nonzero((lost <= budget) & (after > position[:, None]))
        if not len(state):
            return None
        keep = _best(key[state] ^ names[device], lost[state, device], width)
        state, device = state[keep], device[keep]
        used = used[state]
        used[np.arange(len(state)), device] = True
        position, key = after[state, device], key[state] ^ names[device]
        chosen = np.column_stack((chosen[state], device))
    return None


def _best(keys: Ints, lost: Floats, width: int) -> Ints:
    """The `width` entries that lost least, one for each set of devices."""
    by_set = np.lexsort((lost, keys))
    first = np.ones(len(keys), dtype=bool)
    first[1:] = keys[by_set[1:]] != keys[by_set[:-1]]
    kept = by_set[first]
    return kept[np.argsort(lost[kept], kind="stable")[:width]]
