"""For every stage [a, b) at once: what it receives and how much memory it needs.

Tables are bands, `table[a, b - a - 1]`, so that a long model on many devices costs blocks x width, not blocks².
What a stage receives is split by who must have sent it:

    near    made in block a - 1, so certainly in the stage before (values only)
    early   made in block 0, so certainly in the first stage
    other   the rest; a relaxation may take any earlier stage as its source
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isthmus.cost.blocks import BlockItem, Blocks
from isthmus.cost.network import Floats


@dataclass(frozen=True)
class Received:
    """Bytes per stage. `empty` when nothing is ever received this way."""

    held: Floats
    """Per micro-batch in flight; those of the next two are as they are sent."""
    forward: Floats
    backward: Floats
    shared: Floats
    """Bytes of shared parameters, once per step."""
    shared_count: Floats

    @cached_property
    def has_shared(self) -> bool:
        return bool(self.shared.any())

    @cached_property
    def empty(self) -> bool:
        return not (self.has_shared or self.forward.any())

    def __add__(self, other: Received) -> Received:
        return Received(
            self.held + other.held,
            self.forward + other.forward,
            self.backward + other.backward,
            self.shared + other.shared,
            self.shared_count + other.shared_count,
        )


class StageTables:
    """Tables for stages of at most `width` blocks."""

    def __init__(self, blocks: Blocks, width: int | None = None) -> None:
        self.blocks = blocks
        self.count = blocks.count
        self.width = min(width or blocks.count, blocks.count)
        self.work = self._span(blocks.work)
        self.near = self._received("near")
        self.early = self._received("early")
        self.other = self._received("other")
        self.total = self.near + self.early + self.other
        self.fixed_bytes = self._variables() + self._span(blocks.once)
        self.micro_batch_bytes = self._span(blocks.saved) + self.total.held

    def _span(self, cumulative: Floats) -> Floats:
        """cumulative[b] - cumulative[a]; stages past the end repeat the last block, and are never reached."""
        ends = np.minimum(np.arange(self.count)[:, None] + np.arange(1, self.width + 1), self.count)
        return cumulative[ends] - cumulative[: self.count, None]

    def _received(self, kind: str) -> Received:
        tables = [np.zeros((self.count, self.width)) for _ in range(5)]
        for item in self.blocks.items:
            amounts = (
                (0, 0, 0, item.forward_bytes, 1)
                if item.per_step
                else (item.held_bytes, item.forward_bytes, item.backward_bytes, 0, 0)
            )
            for first, last, use in _segments(item, kind):
                for table, amount in zip(tables, amounts, strict=True):
                    self._charge(table, first, last, use, amount)
        return Received(*(np.cumsum(table, axis=1) for table in tables))

    def _variables(self) -> Floats:
        table = np.zeros((self.count, self.width))
        for variable in self.blocks.variables:
            start, amount = 0, variable.owned_bytes
            for use in variable.uses:
                self._charge(table, start, use, use, amount)
                start, amount = use + 1, variable.user_bytes
        return np.cumsum(table, axis=1)

    def _charge(self, table: Floats, first: int, last: int, use: int, amount: int) -> None:
        """Stages that start in first..last pay `amount` as soon as they reach past block `use`."""
        first = max(first, use - self.width + 1)
        if amount and first <= last:
            starts = np.arange(first, last + 1)
            table[starts, use - starts] += amount


def _segments(item: BlockItem, kind: str) -> list[tuple[int, int, int]]:
    """(first, last, use): for stages that start in first..last, `use` is the next block that takes the item."""
    found: list[tuple[int, int, int]] = []
    start = item.made_in + 1
    near = start - 1 if item.per_step else start  # a shared parameter has no bottleneck term to sharpen
    for use in item.uses:
        first, last = start, use
        start = use + 1
        if kind == "near":
            last = min(last, near)
        else:
            first = max(first, near + 1)
            if (item.made_in == 0) != (kind == "early"):
                continue
        if first <= last:
            found.append((first, last, use))
    return found
