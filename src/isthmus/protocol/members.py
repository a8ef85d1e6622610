"""The devices of a run: connected, expected or leaving, and the state that each holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from isthmus.protocol.recovery import StateHolding


class Members:
    def __init__(self) -> None:
        self.here: set[str] = set()
        """Devices with a process that has joined the run."""
        self._offered: set[str] = set()
        """Devices that could be called."""
        self._leaving: set[str] = set()
        self._held: dict[str, Sequence[StateHolding]] = {}

    @property
    def available(self) -> frozenset[str]:
        """Whom a plan may use."""
        return frozenset((self.here | self._offered) - self._leaving)

    @property
    def holdings(self) -> Mapping[str, Sequence[StateHolding]]:
        """By device that is here."""
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
