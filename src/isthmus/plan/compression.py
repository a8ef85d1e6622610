"""How the messages of an edge are packed for the wire."""

from __future__ import annotations

import math

import msgspec

from isthmus.errors import UserError


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of an edge. Raises UserError for a ratio below 1 or negative bytes."""

    codec: str
    ratio: float = 1.0
    """Elements of a tensor per element that is sent: 100 keeps 1 % of them, 1 keeps all."""
    wire_bytes: int
    """Of one micro-batch's message, with what the codec leaves as it is."""

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < math.inf:
            raise UserError(f"compression: ratio: got {self.ratio}, expected a finite number of at least 1")
        if self.wire_bytes < 0:
            raise UserError(f"compression: wire_bytes: got {self.wire_bytes}, expected at least 0")
