"""The memory of an emulated device: how much of it tensors take, and what torch's caching allocator reserves for them.

As `c10/cuda/CUDACachingAllocator.cpp` does it without options: tensors get blocks of segments. A block is a multiple of
512 bytes, the smallest free one that is large enough, and split if much of it is left. What is freed joins the free
blocks beside it, and serves the stream that it was made for. Segments are given back only when memory runs out.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from isthmus.accelerators.accelerator import MemoryUse
from isthmus.units import format_size

BLOCK = 512
SMALL = 2**20
"""Largest of those that come from segments of `SMALL_SEGMENT` bytes. More than that is split off a larger block."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
"""Bytes of the segments of larger blocks, up to half of that size. A block beyond has a segment of its own: a multiple
of `SMALL_SEGMENT`."""


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    segment: int
    start: int
    size: int
    pool: tuple[int, bool]  # (stream, whether small)
    used: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.start

    @property
    def whole(self) -> bool:
        """Return whether it is its segment."""
        return self.before is None and self.after is None


class CheckedMemory:
    """The caller holds the lock."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._free: defaultdict[tuple[int, bool], list[Block]] = defaultdict(list)
        """Free blocks, sorted by size."""
        self._segments = itertools.count()

    def take(self, size: int, stream: int) -> Block:
        """OutOfMemoryError, with the figures, where it is not there."""
        size = rounded(max(size, 1), BLOCK)
        pool = stream, size <= SMALL
        free = self._free[pool]
        at = bisect.bisect_left(free, (size, -1, -1), key=lambda block: block.key)
        block = free.pop(at) if at < len(free) else self._segment(size, pool)
        left = block.size - size
        if left >= BLOCK if pool[1] else left > SMALL:
            self._split(block, size)
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: Block) -> None:
        block.used = False
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._free[other.pool].remove(other)
                block = _joined(block, other)
        bisect.insort(self._free[block.pool], block, key=lambda b: b.key)

    def _segment(self, size: int, pool: tuple[int, bool]) -> Block:
        if pool[1]:
            whole = SMALL_SEGMENT
        else:
            whole = LARGE_SEGMENT if size < LARGE_SEGMENT // 2 else rounded(size, SMALL_SEGMENT)
        if self.reserved + whole > self.total:
            self.give_back_unused()
        if self.reserved + whole > self.total:
            raise torch.OutOfMemoryError(
                f"{self.name} out of memory. Tried to allocate {format_size(whole)}. It has a total capacity of "
                f"{format_size(self.total)}, of which {format_size(self.total - self.reserved)} is free. "
                f"{format_size(self.reserved)} is reserved by this process, and {format_size(self.allocated)} of "
                "it allocated."
            )
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(next(self._segments), 0, whole, pool)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.segment, block.start + size, block.size - size, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        bisect.insort(self._free[rest.pool], rest, key=lambda b: b.key)

    def give_back_unused(self) -> None:
        """Gives back the segments that hold nothing."""
        for pool, free in self._free.items():
            self.reserved -= sum(block.size for block in free if block.whole)
            self._free[pool] = [block for block in free if not block.whole]

    def reset_peak(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def use(self) -> MemoryUse:
        return MemoryUse(
            total=self.total,
            free=self.total - self.reserved,
            allocated=self.allocated,
            reserved=self.reserved,
            peak_allocated=self.peak_allocated,
            peak_reserved=self.peak_reserved,
        )


def _joined(one: Block, other: Block) -> Block:
    """Two neighbours as one free block."""
    first, second = (one, other) if one.start < other.start else (other, one)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
