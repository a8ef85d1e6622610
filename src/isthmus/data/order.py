"""The order in which samples are used: one endless stream, the same on every machine.

The samples at any range of the stream follow from (size, seed, shuffle), and of data in blocks from their layout, so
that only ranges (start, count) need to travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from isthmus.data.layout import BlockOrder, Layout
from isthmus.errors import UserError
from isthmus.plans.schedule import feeder_slot


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int, epoch: int, holder: int) -> npt.NDArray[np.int64]:
    drawn_from = [seed, epoch, holder] if holder else [seed, epoch]
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(drawn_from)))
    order = generator.permutation(size)
    order.flags.writeable = False  # callers share the cached array
    return order


@dataclass(frozen=True)
class SampleOrder:
    """An endless stream over `size` samples: position p lies in epoch p // size, which uses each sample once.

    With `shuffle`, each epoch has its own permutation, drawn from (seed, epoch) with numpy's PCG64; of the data of a
    holder that is not the first, from (seed, epoch, holder). With a `layout` an epoch goes through blocks, and mixes
    the samples of a few of them (`isthmus.data.layout`).
    Raises `UserError` for a size below 1, or another than the layout's, or a negative seed.
    """

    size: int
    seed: int
    shuffle: bool = True
    holder: int = 0
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"sample order: got size {self.size}, expected at least 1")
        if self.seed < 0:
            raise UserError(f"sample order: got seed {self.seed}, expected at least 0")
        if self.layout is not None and self.layout.samples != self.size:
            raise UserError(f"sample order: got size {self.size}, expected the layout's {self.layout.samples}")

    @cached_property
    def _blocks(self) -> BlockOrder | None:
        return None if self.layout is None else BlockOrder(self.layout, self.seed, self.holder)

    def indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The samples at positions start .. start + count - 1, int64 [count]. Costs no walk from position 0."""
        if start < 0 or count < 0:
            raise ValueError(f"got start {start} and count {count}, expected both at least 0")
        if not self.shuffle:
            return np.arange(start, start + count, dtype=np.int64) % self.size
        result = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, offset = divmod(start + filled, self.size)
            part = self._part(epoch, offset, count - filled)
            result[filled : filled + len(part)] = part
            filled += len(part)
        return result

    def _part(self, epoch: int, offset: int, count: int) -> npt.NDArray[np.int64]:
        """At most `count` of the epoch's samples from `offset` on, one at least."""
        if self._blocks is not None:
            return self._blocks.indices(epoch, offset, count)
        return _permutation(self.size, self.seed, epoch, self.holder)[offset : offset + count]

    def epochs(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The epochs of the positions start .. start + count - 1, int64 [count]."""
        return np.arange(start, start + count, dtype=np.int64) // self.size


@dataclass(frozen=True)
class JoinedOrder:
    """The order of several holders' samples: micro-batch after micro-batch, each of one holder, whose turn it is.

    Each holder's samples come in an order of its own, `SampleOrder`'s of its count, drawn from (seed, epoch, holder).
    With one holder it is `SampleOrder`. Raises `UserError` as that does.
    """

    counts: tuple[int, ...]
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        _ = self._orders

    @cached_property
    def _orders(self) -> tuple[SampleOrder, ...]:
        return tuple(SampleOrder(count, self.seed, self.shuffle, holder) for holder, count in enumerate(self.counts))

    def own(self, number: int, size: int) -> tuple[SampleOrder, int]:
        """The order of the holder whose micro-batch `number` of `size` samples is, counted from the run's first, and
        the position in it of the micro-batch's first sample."""
        holder, turns = feeder_slot(self.counts, number)
        return self._orders[holder], turns * size

    def indices(self, number: int, size: int) -> npt.NDArray[np.int64]:
        """The samples of a micro-batch by their places in the joined data: one holder's after those of another."""
        order, start = self.own(number, size)
        return order.indices(start, size) + sum(self.counts[: order.holder])
