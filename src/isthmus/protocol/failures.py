"""Steps that failed on a device, and retries of a run: when to give up."""

from __future__ import annotations

from collections.abc import Set

import msgspec

from isthmus.wire_types import CountOrNone, Name, Text


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
