"""Which device failed: its neighbours notice the failure too, and may report it before its own timeout. And retries of
a run: when to give up."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from isthmus.errors import IsthmusError, PeerError
from isthmus.wire_types import CountOrNone, Name, Text

GRACE_S = 1.0
"""How long to wait for a better explanation than the first one."""
EXIT_S = 10.0
"""How long to wait for the exit of a process that is known to run and whose connection closed. It ends in this moment,
and how it ended is the better explanation: on a machine that is busy it is heard of later than the grace is long."""
CLOSED = "its connection closed"
"""Why a device is lost of which nothing more is known."""


class FailureDetector:
    """Everything heard of devices that are gone, and the verdict."""

    def __init__(self) -> None:
        self._reported: list[tuple[str, IsthmusError]] = []
        self._failed: dict[str, str] = {}
        self._disconnected: dict[str, str] = {}
        self._accusers: dict[str, str] = {}
        self._since_s: float | None = None

    def reported(self, device: str, failure: IsthmusError) -> None:
        """The device said what went wrong on it, or sent what is wrong."""
        self._reported.append((device, failure))

    def failed(self, device: str, reason: str) -> None:
        """The device said why its process ends; another one may do better."""
        self._failed.setdefault(device, reason)

    def disconnected(self, device: str, reason: str) -> None:
        """Its connection closed, or it fell silent."""
        self._disconnected.setdefault(device, reason)

    def accused(self, device: str, reason: str) -> None:
        """The device cannot go on because of another one."""
        self._accusers.setdefault(device, reason)

    def cleared(self, device: str) -> None:
        """Forget the device, which is out of the run, and all accusations: they are of the plan that is given up."""
        self._reported = [(d, failure) for d, failure in self._reported if d != device]
        self._disconnected.pop(device, None)
        self._failed.pop(device, None)
        self._accusers.clear()
        self._since_s = None

    @property
    def certain(self) -> bool:
        """Whether `verdict` has one already."""
        return bool(self._reported or self._failed)

    @property
    def permanent(self) -> bool:
        """Whether the device of the next verdict cannot work, however often it is asked."""
        return bool(self._reported)

    def decide(
        self, now_s: float, ended: Mapping[str, str], running: Set[str] = frozenset()
    ) -> tuple[str, IsthmusError] | None:
        """The device that the run has lost and why, once that is clear. Asked again and again. `ended`: by device, how
        its process ended; `running`: devices whose process is not known to have ended."""
        if self._reported:
            return self._reported[0]
        for device, reason in self._failed.items():
            return device, PeerError(f"device {device!r} was lost: {reason}")
        for device, how in ended.items():
            if device not in self._accusers:
                self._disconnected[device] = how  # says more than that its connection closed
        if not self._disconnected and not self._accusers:
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < GRACE_S:
            return None
        for device, reason in self._disconnected.items():
            if device not in self._accusers:
                if reason == CLOSED and device in running and now_s - self._since_s < EXIT_S:
                    return None
                return device, PeerError(f"device {device!r} was lost: {reason}")
        # Both ends of a link that is cut may accuse each other. Which was heard first is chance.
        device, reason = min(self._accusers.items())
        return device, PeerError(f"device {device!r}: {reason}")


def without_name(failure: IsthmusError, device: str) -> str:
    """For who names the device itself."""
    return str(failure).removeprefix(f"device {device!r} was lost: ").removeprefix(f"device {device!r}: ")


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the job's model or data raised on a device. Devices that fail alike fail at the same step, by the
    same operator or cause."""

    step: CountOrNone
    what: Name
    """The operator and its module, or what else raised."""
    reason: Text
    """In words, with samples."""
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
        """Who failed alike before; empty for nobody: the device is suspected then, unless its memory was short."""
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
        self._at_it = True
        """Whether the run has begun since the last loss that counts."""
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
