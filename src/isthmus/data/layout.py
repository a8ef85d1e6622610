"""The order of samples that lie in blocks, for data that are never read as a whole.

    natural order    | block 0 | block 1 | block 2 | block 3 | block 4 |     a block is read whole
    1. blocks        | block 3 | block 0 | block 4 | block 2 | block 1 |     in an order of the epoch's own
    2. windows       [ 3 and 0, mixed    ][ 4 and 2, mixed   ][ 1      ]     `window` blocks each

Each position follows from the sizes of the blocks, the seed and the epoch, so that any can be reached without those
before it. Who reads in this order keeps `window` blocks at once. (Rejected: a shuffle buffer, whose contents follow
from everything that was read before.)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.wire_types import Count, Many

MOST_BLOCKS = 1 << 22
MOST_RUNS = 1 << 17  # runs of a layout that travels


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many samples the blocks of a data set have, and how many blocks are mixed."""

    runs: Many[tuple[Count, Count]]  # (blocks, samples of each), one run of equal blocks after another
    window: Count  # blocks whose samples are mixed with each other

    @property
    def samples(self) -> int:
        return sum(blocks * samples for blocks, samples in self.runs)

    def sizes(self) -> NDArray[np.int64]:
        """(blocks,) samples of each."""
        runs = np.array(self.runs, dtype=np.int64).reshape(-1, 2)
        return np.repeat(runs[:, 1], runs[:, 0])


def layout_of(sizes: Iterable[int], window: int) -> Layout:
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + 1, size)
        else:
            runs.append((1, size))
    return Layout(runs=tuple(runs), window=window)


def check_layout(layout: Layout, samples: int) -> None:
    """UserError for one that no data have: somebody else wrote it."""
    if not 1 <= len(layout.runs) <= MOST_RUNS or not 1 <= layout.window <= MOST_BLOCKS:
        raise UserError(f"layout: got {len(layout.runs)} runs and window {layout.window}, expected 1 or more of each")
    if any(blocks < 1 or size < 1 for blocks, size in layout.runs):
        raise UserError("layout: got a run without samples, expected blocks and samples above 0")
    if (blocks := sum(count for count, _ in layout.runs)) > MOST_BLOCKS:
        raise UserError(f"layout: got {blocks} blocks, expected at most {MOST_BLOCKS}")
    if layout.samples != samples:
        raise UserError(f"layout: got blocks of {layout.samples} samples in all, expected {samples}")


class BlockOrder:
    """The shuffled order of each epoch. It holds 8 bytes a block, and of two windows 8 bytes a sample."""

    def __init__(self, layout: Layout, seed: int, holder: int = 0) -> None:
        self._drawn_from = (seed, holder)
        self._window = layout.window
        self._sizes = layout.sizes()
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._epoch = lru_cache(maxsize=2)(self._epoch_of)
        self._mixed = lru_cache(maxsize=2)(self._mixed_of)

    def indices(self, epoch: int, offset: int, count: int) -> NDArray[np.int64]:
        """At most `count` samples at the positions of the epoch from `offset` on, int64: those of one window."""
        _, ends = self._epoch(epoch)
        number = int(np.searchsorted(ends, offset, side="right"))
        begin = int(ends[number - 1]) if number else 0
        return self._mixed(epoch, number)[offset - begin : offset - begin + count]

    def _epoch_of(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The blocks in the epoch's order, and the position after the last of each window."""
        blocks = self._draws(epoch, 0).permutation(len(self._sizes))
        ends = np.cumsum(self._sizes[blocks])
        last = np.arange(self._window, len(ends) + self._window, self._window) - 1
        return blocks, ends[np.minimum(last, len(ends) - 1)]

    def _mixed_of(self, epoch: int, number: int) -> NDArray[np.int64]:
        blocks = self._epoch(epoch)[0][number * self._window : (number + 1) * self._window]
        places = zip(self._starts[blocks].tolist(), self._sizes[blocks].tolist(), strict=True)
        parts = [np.arange(start, start + size) for start, size in places]
        order = self._draws(epoch, number + 1).permutation(np.concatenate(parts))
        order.flags.writeable = False  # callers share the cached array
        return order

    def _draws(self, epoch: int, use: int) -> np.random.Generator:
        seed, holder = self._drawn_from
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, holder, use])))
