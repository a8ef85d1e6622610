"""The memory of an emulated device: how much of it tensors take, and what a caching allocator would reserve for them.

As torch's allocator does it: blocks are multiples of 512 bytes; those up to 1 MiB come from segments of 2 MiB, larger
ones are multiples of 2 MiB; what one stream has freed serves that stream again, and is given back only when memory
runs out. Fragmentation is left out.
"""

from __future__ import annotations

from collections import Counter

import torch

from isthmus.accelerators.accelerator import MemoryUse
from isthmus.units import format_size

BLOCK = 512
SMALL = 2**20
SEGMENT = 2 * 2**20


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Memory:
    """The caller holds the lock."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.allocated = 0
        self.peak_reserved = 0
        self._used: Counter[tuple[int, bool]] = Counter()
        """(stream, whether small) -> bytes in blocks of tensors."""
        self._reserved: Counter[tuple[int, bool]] = Counter()

    @property
    def reserved(self) -> int:
        return self._reserved.total()

    def take(self, size: int, stream: int) -> None:
        """OutOfMemoryError, with the figures, where it is not there."""
        pool, block = _pool(size, stream)
        needed = rounded(self._used[pool] + block, SEGMENT)
        if self.reserved - self._reserved[pool] + max(needed, self._reserved[pool]) > self.total:
            self.give_back_unused()
            if self.reserved - self._reserved[pool] + needed > self.total:
                raise torch.OutOfMemoryError(
                    f"{self.name} out of memory. Tried to allocate {format_size(block)}. It has a total capacity of "
                    f"{format_size(self.total)}, of which {format_size(self.total - self.reserved)} is free. "
                    f"{format_size(self.reserved)} is reserved by this process, and {format_size(self.allocated)} of "
                    "it allocated."
                )
        self._used[pool] += block
        self._reserved[pool] = max(self._reserved[pool], needed)
        self.allocated += rounded(size, BLOCK)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def give(self, size: int, stream: int) -> None:
        pool, block = _pool(size, stream)
        self._used[pool] -= block
        self.allocated -= rounded(size, BLOCK)

    def give_back_unused(self) -> None:
        self._reserved = Counter({pool: rounded(used, SEGMENT) for pool, used in self._used.items()})

    def reset_peak(self) -> None:
        self.peak_reserved = self.reserved

    def use(self) -> MemoryUse:
        return MemoryUse(
            total=self.total, free=self.total - self.reserved, allocated=self.allocated, reserved=self.reserved,
            peak_reserved=self.peak_reserved,
        )  # fmt: skip


def _pool(size: int, stream: int) -> tuple[tuple[int, bool], int]:
    """Where it comes from, and the bytes that it takes there."""
    block = rounded(max(size, 1), BLOCK)
    small = block <= SMALL
    return (stream, small), block if small else rounded(block, SEGMENT)
