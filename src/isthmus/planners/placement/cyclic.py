"""Circular local search over balanced groups: devices move in a ring of groups, so that sizes stay equal.

Kang and Moon's cyclic partitioning (2000), as DT-FM's search uses it (sec. 3.4). The gain function is a parameter: the
paper's fastest-link gain or Kernighan-Lin's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.cost.kernel import Floats, Ints

Gain = Callable[[Ints, NDArray[np.bool_]], Floats]
"""(group of each device, which devices may move) -> [devices, groups] gain of each move; -inf for what may not be."""


class _Move(NamedTuple):
    device: int
    source: int
    target: int
    gain: float
    gain_home: float
    """Of going to the ring's first group instead, which would close the ring here."""


def cyclic_search(labels: Ints, groups: int, gain: Gain, *, last_ring: bool = True) -> Ints:
    """The labels [devices] after the best prefix of up to `groups` rings of moves; no device moves twice.

    Without `last_ring` the prefix ends before the last of the rings that were made.
    """
    movable = np.ones(len(labels), dtype=np.bool_)
    visited: set[int] = set()
    made, total = [(0.0, labels)], 0.0
    for _ in range(groups):
        moves = _ring(made[-1][1], movable, visited, gain)
        if not moves:
            break
        now, gained = _closed(made[-1][1], moves)
        total += gained
        made.append((total, now))
        if len(visited) == groups:
            break
    counted = made if last_ring or len(made) == 1 else made[:-1]
    return max(counted, key=lambda after: after[0])[1]


def _ring(labels: Ints, movable: NDArray[np.bool_], visited: set[int], gain: Gain) -> list[_Move]:
    """Moves from group to group until one returns to the first group. Locks what it moves."""
    labels = labels.copy()
    moves: list[_Move] = []
    gains = gain(labels, movable)
    home = here = int(labels[int(gains.max(axis=1).argmax())])
    while True:
        choices = np.where((labels == here)[:, None], gains, -np.inf)
        device, target = (int(i) for i in np.unravel_index(int(choices.argmax()), choices.shape))
        if choices[device, target] == -np.inf:  # everything in this group has moved before
            return moves
        # From the first group there is no going home: that ring moves nothing.
        gain_home = 0.0 if here == home else float(gains[device, home])
        moves.append(_Move(device, here, target, float(gains[device, target]), gain_home))
        labels[device] = target
        movable[device] = False
        visited.add(target)
        here = target
        if here == home:
            return moves
        gains = gain(labels, movable)


def _closed(labels: Ints, moves: list[_Move]) -> tuple[Ints, float]:
    """The best prefix of a ring, its last device sent home instead, and what that gains (0 where nothing moves)."""
    sums = np.cumsum([0.0, *(move.gain for move in moves[:-1])])
    closings = sums + np.array([move.gain_home for move in moves])
    last = int(closings.argmax())
    if closings[last] <= 0:
        return labels, 0.0
    closed = labels.copy()
    for move in moves[:last]:
        closed[move.device] = move.target
    closed[moves[last].device] = moves[0].source
    return closed, float(closings[last])


def membership(labels: Ints, groups: int) -> Floats:
    """[devices, groups]: 1 where the device belongs to the group."""
    return (labels[:, None] == np.arange(groups)).astype(np.float64)
