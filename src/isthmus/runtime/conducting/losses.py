"""Which device is to blame: when one fails its neighbours notice too, and may say so before it is missed itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.errors import IsthmusError, PeerError

GRACE_S = 1.0
"""How long to wait for a better explanation than the first one."""


class Losses:
    """Everything heard of devices that are gone, and the verdict."""

    def __init__(self, ended: Callable[[], Mapping[str, str]]) -> None:
        """`ended` tells of which devices the process has ended, and how."""
        self._ended = ended
        self._told: list[tuple[str, IsthmusError]] = []
        self._failed: dict[str, str] = {}
        self._vanished: dict[str, str] = {}
        self._blaming: dict[str, str] = {}
        self._since_s: float | None = None

    def told(self, device: str, failure: IsthmusError) -> None:
        """The device said what went wrong on it, or sent what is wrong."""
        self._told.append((device, failure))

    def failed(self, device: str, reason: str) -> None:
        """The device said why its process ends; another one may do better."""
        self._failed.setdefault(device, reason)

    def vanished(self, device: str, reason: str) -> None:
        """Its connection closed, or it fell silent."""
        self._vanished.setdefault(device, reason)

    def blames(self, device: str, reason: str) -> None:
        """The device cannot go on because of another one."""
        self._blaming.setdefault(device, reason)

    def settled(self, device: str) -> None:
        """It is out. Whoever had trouble with it, or with the plan that is given up, has no more."""
        self._told = [(d, failure) for d, failure in self._told if d != device]
        self._vanished.pop(device, None)
        self._failed.pop(device, None)
        self._blaming.clear()
        self._since_s = None

    @property
    def certain(self) -> bool:
        """Whether `verdict` has one already."""
        return bool(self._told or self._failed)

    @property
    def for_good(self) -> bool:
        """Whether the device of the next verdict cannot work, however often it is asked."""
        return bool(self._told)

    def verdict(self, now_s: float) -> tuple[str, IsthmusError] | None:
        """The device that the run has lost and why, once that is clear. Asked again and again."""
        if self._told:
            return self._told[0]
        for device, reason in self._failed.items():
            return device, PeerError(f"device {device!r} was lost: {reason}")
        for device, how in self._ended().items():
            if device not in self._blaming:
                self._vanished[device] = how  # says more than that its connection closed
        if not self._vanished and not self._blaming:
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < GRACE_S:
            return None
        for device, reason in self._vanished.items():
            if device not in self._blaming:
                return device, PeerError(f"device {device!r} was lost: {reason}")
        device, reason = next(iter(self._blaming.items()))
        return device, PeerError(f"device {device!r}: {reason}")


def without_name(failure: IsthmusError, device: str) -> str:
    """For who names the device itself."""
    return str(failure).removeprefix(f"device {device!r} was lost: ").removeprefix(f"device {device!r}: ")
