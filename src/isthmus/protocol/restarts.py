"""Lost devices that can return: which of them to wait for when too few are left, and how often."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.protocol.coordinator_events import RestartRun

MOST_RECALLS = 3
"""So often the run is begun anew from the same state for want of devices. What kills all of them again and again is
mended by a person."""


class Restarts:
    """Who was lost while its machine stayed, and how often the run waited for such devices."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        """Of all that were lost and are not back."""
        self._returning: set[str] = set()
        self._step = -1
        self._count = 0
        """How often the run was begun anew from the state that it was begun from last."""

    @property
    def awaited(self) -> frozenset[str]:
        """Lost, and expected back."""
        return frozenset(self._returning)

    @property
    def reasons(self) -> str:
        """Why devices were lost that are not back, or were called again just now."""
        return "; ".join(f"{device}: {reason}" for device, reason in sorted(self._reasons.items()))

    def lost(self, device: str, reason: str, *, returns: bool) -> None:
        self._reasons.setdefault(device, reason)
        (self._returning.add if returns else self._returning.discard)(device)

    def back(self, device: str) -> None:
        """It could work now."""
        self._returning.discard(device)

    def at_work(self, device: str) -> None:
        self._returning.discard(device)
        self._reasons.pop(device, None)

    def again(self, step: int) -> bool:
        """The run is to begin anew from the state after `step` steps; False where it did so too often."""
        self._count = self._count + 1 if step <= self._step else 1
        self._step = max(self._step, step)
        return self._count <= MOST_RECALLS

    def recall(self, devices: Collection[str]) -> RestartRun:
        """Told to people: the run begins anew with these devices."""
        return RestartRun(tuple(sorted(devices)), self._count, MOST_RECALLS, self.reasons)

    def vain(self, step: int) -> str:
        return f"devices were called again {MOST_RECALLS} times, each time from the state after step {step}"
