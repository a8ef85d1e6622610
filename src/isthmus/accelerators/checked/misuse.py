"""The error of the emulated accelerator for wrong use of streams or host memory."""

from __future__ import annotations

from isthmus.errors import InternalError


class Misuse(InternalError):
    """A mistake that would give wrong numbers on hardware, but not every time. `FOUND` keeps it, even if a caller
    catches it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        FOUND.append(self)


FOUND: list[Misuse] = []


class DataRace(Misuse):
    """Two streams access one tensor, at least one of them writes, and nothing gives them an order."""


class HostBufferInUse(Misuse):
    """The host wrote to a host buffer before the copy that reads or writes it was done."""


class FreedTooEarly(Misuse):
    """A tensor was dropped while a stream that had not said `used_here` worked with it: its memory may have another
    owner by then."""


class RefusedWait(Misuse):
    """An implicit copy, or a wait of the host, where there must be none."""
