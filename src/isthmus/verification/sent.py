"""Bytes between stages by the blocks that make them: which earlier stage sends them is known once it is placed."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.verification.packing import wire_bytes
from isthmus.verification.reading import GraphReading

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ReceivedBytes(NamedTuple):
    """The bytes that a stage receives: `x[h]` comes from block h or a later one before the stage."""

    there: Floats  # bytes of values; so is the next, of what is returned for them
    back: Floats
    shared: Floats  # bytes of parameters that an earlier stage updates
    parameters: Floats  # how many these are
    first: int  # the first block that any of this comes from; the stage's own start where nothing comes


class SentBytes:
    def __init__(self, reading: GraphReading) -> None:
        self._starts = (0, *reading.places)
        values = reading.values
        shared = [v for v in reading.variables if v.trained and v.uses]
        self._made = self._block_of([v.made for v in values])
        self._bytes = np.array([wire_bytes(reading.question, v) for v in values], dtype=np.float64)
        self._used = self._next([v.uses for v in values])
        self._returned = self._next([v.returns for v in values])
        self._owned = self._block_of([v.uses[0] for v in shared])
        self._shared_bytes = np.array([v.size_bytes for v in shared], dtype=np.float64)
        self._shared_used = self._next([v.uses for v in shared])
        self.received = cache(self._received)

    def _block_of(self, positions: Sequence[int]) -> Ints:
        return np.array([bisect.bisect_right(self._starts, p) - 1 for p in positions], dtype=np.int64)

    def _next(self, uses: Sequence[Sequence[int]]) -> Ints:
        """[start, item]: the first of its uses at or behind that block; the number of blocks where there is none."""
        count = len(self._starts)
        found = np.full((count + 1, len(uses)), count)
        for item, positions in enumerate(uses):
            for block in self._block_of(positions):
                found[block, item] = block
        return np.minimum.accumulate(found[::-1], axis=0)[::-1]

    def _received(self, start: int, end: int) -> ReceivedBytes:
        """Return the bytes that a stage of the blocks from `start` up to `end` receives from earlier ones."""

        def by_block(made: Ints, used: Ints, amounts: Floats) -> Floats:
            chosen = (made < start) & (used[start] < end)
            each = np.zeros(start + 1)
            np.add.at(each, made[chosen], amounts[chosen])
            return np.cumsum(each[::-1])[::-1]

        rows = (
            by_block(self._made, self._used, self._bytes),
            by_block(self._made, self._returned, self._bytes),
            by_block(self._owned, self._shared_used, self._shared_bytes),
            by_block(self._owned, self._shared_used, np.ones(len(self._owned))),
        )
        some = np.flatnonzero(sum(row[:-1] - row[1:] for row in rows) > 0)
        return ReceivedBytes(*rows, first=int(some[0]) if len(some) else start)
