"""The devices of a run: connected, expected or leaving, the state that each holds, and lost ones that can return."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from isthmus.protocol.recovery import StateHolding


class Members:
    def __init__(self) -> None:
        self.here: set[str] = set()  # devices with a process that has joined the run
        self._offered: set[str] = set()  # devices that could be called
        self._leaving: set[str] = set()
        self._held: dict[str, Sequence[StateHolding]] = {}

    @property
    def available(self) -> frozenset[str]:
        """Whom a plan may use."""
        return frozenset((self.here | self._offered) - self._leaving)

    @property
    def holdings(self) -> Mapping[str, Sequence[StateHolding]]:
        """The state that each device which is here holds."""
        return {device: held for device, held in self._held.items() if device in self.here}

    @property
    def silent(self) -> frozenset[str]:
        """Those here that have not said what they hold since they were asked."""
        return frozenset(self.here - self._held.keys())

    def missing(self, devices: Iterable[str]) -> list[str]:
        return [device for device in devices if device not in self.here]

    def joined(self, device: str, holdings: Sequence[StateHolding]) -> None:
        self.here.add(device)
        self._offered.discard(device)
        self._held[device] = holdings

    def holds(self, device: str, holdings: Sequence[StateHolding]) -> None:
        self._held[device] = holdings

    def asked(self) -> None:
        """All that are here were: what they held before counts no more."""
        self._held.clear()

    def offered(self, device: str) -> None:
        self._offered.add(device)

    def leaves(self, device: str) -> None:
        self._leaving.add(device)

    def stay(self) -> None:
        """All that were to leave: there is no plan without them."""
        self._leaving.clear()

    def leaving(self, devices: Collection[str]) -> frozenset[str]:
        """Those of them that are to leave."""
        return frozenset(self._leaving.intersection(devices))

    def released(self, devices: Collection[str]) -> list[str]:
        """Those here that are to leave, beside these devices, whom the plan uses: they are gone now."""
        gone = sorted(self._leaving & self.here - set(devices))
        for device in gone:
            self.gone(device)
        return gone

    def gone(self, device: str) -> None:
        self._held.pop(device, None)
        for devices in (self.here, self._offered, self._leaving):
            devices.discard(device)


MOST_RECALLS = 3
"""So often the run is begun anew from the same state for want of devices. What kills all of them again and again is
mended by a person."""


class Restarts:
    """Devices that were lost while their machine stayed, and how often the run waited for such devices."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}  # why each device was lost that is not back
        self._returning: set[str] = set()
        self._in_queue: frozenset[str] = frozenset()
        self._step = -1
        self.count = 0  # how often the run was begun anew from the state that it was begun from last
        self._counted = False  # whether the last time has no plan yet

    @property
    def awaited(self) -> frozenset[str]:
        """Lost, and expected back soon."""
        return frozenset(self._returning - self._in_queue)

    @property
    def queued(self) -> frozenset[str]:
        """Lost, and expected back at any time."""
        return self._in_queue & self._reasons.keys()

    @property
    def reasons(self) -> str:
        """Return why devices were lost that are not back, or were called again just now."""
        return "; ".join(f"{device}: {reason}" for device, reason in sorted(self._reasons.items()))

    def lost(self, device: str, reason: str, *, returns: bool) -> None:
        self._reasons.setdefault(device, reason)
        (self._returning.add if returns else self._returning.discard)(device)

    def wait_in_queue(self, devices: frozenset[str]) -> None:
        """These devices, and no others. Who leaves the queue comes soon."""
        self._returning |= (self._in_queue - devices) & self._reasons.keys()
        self._in_queue = devices

    def back(self, device: str) -> None:
        """It could work now."""
        self._returning.discard(device)

    def at_work(self, device: str) -> None:
        self._returning.discard(device)
        self._reasons.pop(device, None)

    def again(self, step: int) -> bool:
        """The run is to begin anew from the state after `step` steps; False where it did so too often."""
        self.count = self.count + 1 if step <= self._step else 1
        self._step = max(self._step, step)
        self._counted = True
        return self.count <= MOST_RECALLS

    def planned(self) -> None:
        """There is a plan: the run was begun anew."""
        self._counted = False

    def too_few(self) -> None:
        """There is no plan yet, and more devices come: this time does not count."""
        self.count -= self._counted
        self._counted = False

    def vain(self, step: int) -> str:
        return f"devices were called again {MOST_RECALLS} times, each time from the state after step {step}"
