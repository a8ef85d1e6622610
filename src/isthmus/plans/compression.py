"""How the messages of an edge are packed for the wire."""

from __future__ import annotations

import msgspec

from isthmus.errors import UserError
from isthmus.plans.packing import Packing


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of an edge. Raises UserError for an unknown codec, a ratio below 1 or negative bytes."""

    codec: str
    ratio: float = 1.0
    """Elements of a tensor per element that is sent: 100 keeps 1 % of them, 1 keeps all."""
    feedback: bool = False
    """Whether the sender adds what it left out of a sample's gradient to that of the same sample in the next pass."""
    wire_bytes: int
    """Of one micro-batch's message, with what the codec leaves as it is."""

    def __post_init__(self) -> None:
        try:
            _ = self.packing
        except UserError as e:
            raise UserError(f"compression: {e}") from None
        if self.wire_bytes < 0:
            raise UserError(f"compression: wire_bytes: got {self.wire_bytes}, expected at least 0")

    @property
    def packing(self) -> Packing:
        return Packing(codec=self.codec, ratio=self.ratio, feedback=self.feedback)
