"""The devices of a simulated replica: which of them are there, what a step takes on them, and what a loss costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class PlannedStep(NamedTuple):
    """A replica's step on some of its devices."""

    step_s: float
    busy_s: Mapping[str, float]  # seconds that each device of the plan computes
    begin_s: float = 0.0
    """From a loss, or from the end of the last step before, until this plan is at work: to plan, and to move state."""
    keep_every: int = 0  # steps between snapshots; 0: none are kept, and what is lost with a device is lost
    links: frozenset[frozenset[str]] = frozenset()  # pairs of devices that send each other messages in a step


Planned = Callable[[frozenset[str]], PlannedStep | None]
"""On the devices that are there; None where they cannot hold the model."""


class ReplicaDevices:
    """The devices of one replica. It knows no clock."""

    def __init__(self, devices: frozenset[str], planned: Planned) -> None:
        self.present = set(devices)
        self._planned = planned
        self.plan: PlannedStep | None = None
        self._kept = 0  # steps behind the newest snapshot
        self.again = 0  # steps that are to be made again

    def begin(self, steps: int = 0) -> bool:
        """Return whether the devices that are there can begin anew, after so many steps."""
        self.plan, self._kept, self.again = self._planned(frozenset(self.present)), steps, 0
        return self.plan is not None

    def lost(self, device: str, steps: int, *, leaves: bool = False) -> bool:
        """After so many steps. Whether the step under way is void; `plan` is None where the rest cannot go on.
        `leaves`: the device gives what it has to others first."""
        self.present.discard(device)
        if self.plan is None or device not in self.plan.busy_s:
            return False
        self.again = self.again if leaves else steps - self._kept
        goes_on = leaves or self.plan.keep_every > 0
        self.plan = self._planned(frozenset(self.present)) if goes_on else None
        return True

    def stepped(self, steps: int) -> bool:
        """A step is over, of which there are now `steps` if it was a new one: whether it was."""
        assert self.plan is not None, "made on a plan"
        if self.again:
            self.again -= 1
            return False
        if not self.plan.keep_every or steps % self.plan.keep_every == 0:
            self._kept = steps
        return True

    def better(self) -> float:
        """Between two steps, take a better plan for the devices that are there: how long that takes."""
        found = self._planned(frozenset(self.present))
        if self.plan is None or found is None or found.step_s >= self.plan.step_s:
            return 0.0
        self.plan = found
        return found.begin_s
