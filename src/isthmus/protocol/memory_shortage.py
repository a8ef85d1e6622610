"""How much memory a stage took. After a shortage, later plans use less memory on that device."""

from __future__ import annotations

import msgspec

from isthmus.units import format_size
from isthmus.wire_types import Amount


class MemoryShortage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, when memory was short."""

    asked: Amount  # bytes that could not be allocated; 0 where that is not known
    free: Amount  # free bytes of the hardware's memory, for all processes
    total: Amount
    reserved: Amount  # bytes that the device's process had reserved, with those it had before it got the stage
    before: Amount = 0

    @property
    def capacity(self) -> int:
        """Bytes that a stage can have there while other processes keep theirs."""
        return max(1, self.free + self.reserved - self.before)

    @property
    def needed(self) -> int:
        """Bytes that the stage would have taken by then."""
        return max(1, self.reserved - self.before + self.asked)

    @property
    def description(self) -> str:
        asked = f"asked for {format_size(self.asked)}, " if self.asked else ""
        held = f"{format_size(self.reserved)} reserved by this device"
        # an allocator takes memory in blocks, and needs one that is in one piece
        short = " but in no block that is large enough" if 0 < self.asked <= self.free else ""
        return f"{asked}{format_size(self.free)} of {format_size(self.total)} free{short}, {held}"


class MemoryPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a stage took while it ran, in bytes."""

    size_bytes: Amount
    """On an accelerator, bytes in tensors; on the CPU, bytes by which the process's resident set grew."""
    reserved_bytes: Amount
    """On an accelerator, bytes that torch's allocator took from it, in use by tensors or free for others; on the CPU,
    the same again."""
    resident: bool  # whether it is of a resident set


def believed_bytes(short: MemoryShortage, planned: int, stated: int) -> int:
    """The memory that plans may count on, after a stage of `planned` bytes did not fit where `stated` were thought to
    be: what is there, in the plan's own measure. A stage that needed more than was planned will do so again, so that
    what is there counts as less, in proportion; and never as much as would give the same plan again."""
    in_proportion = planned * min(1.0, short.capacity / short.needed)
    return max(1, min(stated, short.capacity, planned - 1, int(in_proportion)))
