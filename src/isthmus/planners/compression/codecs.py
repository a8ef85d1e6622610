"""What codecs make of a message: bytes on the wire. The codecs themselves are the runtime's.

Only what carries a gradient is packed. Ids, masks and positions travel as they are: a mask without its smaller
elements is another mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.errors import UserError

INDEX_GAP = 2**16 - 1
"""The longest gap between two kept elements that 16 bits say; longer ones need an element in between."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way to pack a tensor. Raises UserError for a ratio below 1."""

    name: str
    ratio: float = 1.0
    """Elements per element that is sent."""
    kept_bytes: float
    """Of each element that is sent, with its index."""
    longest_gap: int | None = None
    """Where indexes are written as gaps: the longest, which bounds how many fillers a message needs."""

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < math.inf:
            raise UserError(f"ratio: got {self.ratio}, expected a finite number of at least 1")

    @property
    def bytes_per_element(self) -> float:
        return self.kept_bytes / self.ratio

    def wire_bytes(self, elements: int) -> int:
        """At most so many bytes for a tensor of so many elements."""
        kept = math.ceil(elements / self.ratio)
        fillers = elements // self.longest_gap if self.longest_gap else 0
        return math.ceil((kept + fillers) * self.kept_bytes)


BF16 = Codec(name="bf16", kept_bytes=2.0)
INT8 = Codec(name="int8", kept_bytes=1 + 4 / 256)
"""One float32 scale for each 256 elements."""


def topk(ratio: float) -> Codec:
    """FusionLLM's format: float32 value and int64 index, 12 bytes for each kept element (section 5)."""
    return Codec(name="topk", ratio=ratio, kept_bytes=12.0)


def topk_gap(ratio: float) -> Codec:
    """The same elements with half the bytes: float32 value, and the index as a 16-bit gap to the one before."""
    return Codec(name="topk-gap", ratio=ratio, kept_bytes=6.0, longest_gap=INDEX_GAP)
