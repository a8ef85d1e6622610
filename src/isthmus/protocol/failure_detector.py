"""Decides which device failed. Its neighbours notice the failure too, and may report it before its own timeout."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.errors import IsthmusError, PeerError

GRACE_S = 1.0
"""How long to wait for a better explanation than the first one."""


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

    def decide(self, now_s: float, ended: Mapping[str, str]) -> tuple[str, IsthmusError] | None:
        """The device that the run has lost and why, once that is clear. Asked again and again. `ended`: by device, how
        its process ended."""
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
                return device, PeerError(f"device {device!r} was lost: {reason}")
        # Both ends of a link that is cut may accuse each other. Which was heard first is chance.
        device, reason = min(self._accusers.items())
        return device, PeerError(f"device {device!r}: {reason}")


def without_name(failure: IsthmusError, device: str) -> str:
    """For who names the device itself."""
    return str(failure).removeprefix(f"device {device!r} was lost: ").removeprefix(f"device {device!r}: ")
