"""Steps that failed on a device, memory that was short there, and retries of a run: when to give up."""

from __future__ import annotations

from collections.abc import Set

import msgspec

from isthmus.units import format_size
from isthmus.wire_types import Amount, CountOrNone, Name, Text


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the job's model or data raised on a device. Devices that fail alike fail at the same step, by the
    same operator or cause."""

    step: CountOrNone
    what: Name  # the operator and its module, or what else raised
    reason: Text  # in words, with samples
    memory: bool = False
    """It was memory that was short: no fault of the job's, and with a smaller stage the device is as good as before."""

    def is_like(self, other: StepFailure) -> bool:
        return (self.step, self.what) == (other.step, other.what)

    def described(self, device: str, before: str) -> str:
        """In words: the device, who failed alike `before` it ("" for nobody), and the reason."""
        again = f", as on device {before!r} before" if before and before != device else ", again" if before else ""
        return f"device {device!r}{again}: {self.reason}"


class Suspects:
    """Devices on which a step failed. The job is at fault if it fails alike once more, wherever that is; the device, if
    others do the step without it: it is left out of plans then, as long as there is one without it."""

    def __init__(self) -> None:
        self._failures: dict[str, StepFailure] = {}

    @property
    def devices(self) -> frozenset[str]:
        return frozenset(self._failures)

    def trusted(self, available: frozenset[str]) -> frozenset[str]:
        """Those of them on which no step failed, as long as there are any."""
        return available - self._failures.keys() or available

    def failed(self, device: str, failure: StepFailure) -> str:
        """Return who failed alike before; empty for nobody: the device is suspected then, unless its memory was
        short."""
        if failure.memory:
            return ""
        before = next((d for d, other in self._failures.items() if other.is_like(failure)), "")
        self._failures[device] = failure
        return before

    def stepped(self, step: int, devices: Set[str]) -> None:
        """These devices have done the step."""
        self._failures = {d: f for d, f in self._failures.items() if f.step > step or d not in devices}


class Attempts:
    """Attempts to go on after losses that did no step. Many devices may be lost one soon after the other: an attempt
    that ends with a device's first loss since the last step is none."""

    def __init__(self, limit: int) -> None:
        """`limit`: attempts without a step that end the run; 0 for none."""
        self._limit = limit
        self._lost: set[str] = set()
        self._at_it = True  # whether the run has begun since the last loss that counts
        self.fruitless = 0

    def began(self) -> None:
        """Devices have a plan, and a state to go on from."""
        self._at_it = True

    def stepped(self) -> None:
        self._lost.clear()
        self.fruitless = 0

    def lost(self, device: str) -> bool:
        """The run has to begin again because of this device; whether that was tried often enough."""
        if device in self._lost and self._at_it:
            self.fruitless += 1
            self._at_it = False
        self._lost.add(device)
        return 0 < self._limit <= self.fruitless


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
    """On an accelerator, bytes in tensors; on the CPU, bytes by which the process's resident set grew, without code."""
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
