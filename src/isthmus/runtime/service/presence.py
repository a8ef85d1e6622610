"""Which devices of a fleet are connected, what each works for, and waiting for those that are not here."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from isthmus.protocol.run_messages import PeerPath
from isthmus.runtime.identity.database import StoreError
from isthmus.runtime.identity.roster import Roster
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import MOST_HARDWARE, DevicePresent
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.status_file import DeviceStatus, LinkStatus
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.relay_status import RelayedLink
from isthmus.sanitize import sanitize
from isthmus.units import format_duration

LOOK_S = 1.0
"""How often to check whether an awaited device was revoked."""
REMIND_S = 30.0
"""How often to log the awaited devices."""
REVOKED = "it was revoked"


class Presence:
    """Devices by name; any thread. `log` gets one line for whatever a person may want to know."""

    def __init__(self, roster: Roster, log: Callable[[str], None]) -> None:
        self._roster = roster
        self._log = log
        self._changed = threading.Condition()
        self._lanes: dict[str, SendLane] = {}
        self._hardware: dict[str, str] = {}
        """As the devices call it."""
        self._working: dict[str, str] = {}
        """The run that a process of the device works for."""
        self._ways: dict[str, tuple[str, tuple[PeerPath, ...]]] = {}
        """The run that the device works for, and how it got to others."""
        self._awaited: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._lanes)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Devices without which a run does not begin, as is shown of them."""
        return self._awaited

    def lane(self, device: str) -> SendLane | None:
        """To a device: another one after it has come back."""
        return self._lanes.get(device)

    def tell(self, devices: Iterable[str], message: AnyMessage) -> None:
        """To those of them that are here."""
        with self._changed:
            for device in devices:
                if (lane := self._lanes.get(device)) is not None:
                    lane.put(message)

    def came(self, device: str, lane: SendLane, present: DevicePresent) -> None:
        with self._changed:
            former, self._lanes[device] = self._lanes.get(device), lane
            self._working[device] = present.working
            self._hardware[device] = sanitize(present.hardware)[:MOST_HARDWARE].strip()
            self._changed.notify_all()
        if former is not None:  # it has come back before we noticed that it was gone
            former.close(0.0)

    def left(self, device: str, lane: SendLane) -> None:
        lane.close(1.0)
        with self._changed:
            if self._lanes.get(device) is lane:
                del self._lanes[device]

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            lane.close(1.0)

    def wait_for(self, devices: Sequence[str], stop: Stop) -> None:
        """Until all of them are here, however long that takes: machines are started by people. Interrupted where that
        is to stop."""
        began_s, reminded_s = time.monotonic(), -math.inf
        with self._changed:
            try:
                while missing := [d for d in devices if d not in self._lanes]:
                    stop.check()
                    self._awaited = tuple(map(self._called, missing))
                    if (now_s := time.monotonic()) - reminded_s >= REMIND_S:
                        reminded_s = now_s
                        since = f", for {format_duration(now_s - began_s)}" if now_s - began_s >= REMIND_S else ""
                        here = f"{len(devices) - len(missing)} here"
                        self._log(f"waiting for {', '.join(self._awaited)} to join ({here}){since}")
                    self._changed.wait(LOOK_S)
            finally:
                self._awaited = ()

    def wait_for_any(self, devices: Sequence[str], stop: Stop) -> list[str]:
        """Those of them that are here, once there is one. As `wait_for`."""
        if not self.names & set(devices):
            self._awaited = tuple(map(self._called, devices))
            self._log(f"waiting for one of {', '.join(self._awaited)} to join")
        try:
            with self._changed:
                while not (here := [d for d in devices if d in self._lanes]):
                    stop.check()
                    self._changed.wait(LOOK_S)
        finally:
            self._awaited = ()
        return here

    def _called(self, device: str) -> str:
        """A device that is missing. Of one that was revoked, waiting alone does not help."""
        with contextlib.suppress(StoreError):
            if self._roster.is_revoked(device):
                return f"{device} ({REVOKED}: a new key and a ticket bring it back)"
        return device

    def run_started(self, device: str, run: str) -> None:
        """A process of the device is called to the run."""
        with self._changed:
            self._working[device] = run

    def ended(self, device: str) -> None:
        """Its process has."""
        with self._changed:
            self._working[device] = ""

    def linked(self, device: str, run: str, paths: Sequence[PeerPath]) -> None:
        """How a device at work has got to others."""
        with self._changed:
            self._ways[device] = (run, tuple(paths))

    def works_for(self, device: str, run: str) -> bool:
        """Whether a process of a device that is here was called to the run, and has not ended."""
        with self._changed:
            return device in self._lanes and self._working.get(device) == run

    def idle(self, devices: Iterable[str], run: str) -> list[str]:
        """Those of them that are here, and no process of theirs works for the run."""
        with self._changed:
            return [d for d in devices if d in self._lanes and self._working.get(d) != run]

    def devices(self, ids: Mapping[str, str], runs: Collection[str]) -> tuple[DeviceStatus, ...]:
        """What is shown of those that are here. `ids` are by name, `runs` go on."""
        with self._changed:
            return tuple(
                DeviceStatus(
                    name=name,
                    id=ids.get(name, ""),
                    hardware=self._hardware.get(name, ""),
                    working=self._working.get(name) in runs,
                )
                for name in sorted(self._lanes)
            )

    def links(self, relayed: Sequence[RelayedLink], runs: Collection[str]) -> tuple[LinkStatus, ...]:
        """What is shown of connections between devices at work, some of which are relayed."""
        with self._changed:
            paths = {d: found for d, (run, found) in self._ways.items() if run in runs and self._working.get(d) == run}
        return tuple(_link_status(device, way, relayed) for device, found in sorted(paths.items()) for way in found)


def _link_status(device: str, way: PeerPath, relayed: Sequence[RelayedLink]) -> LinkStatus:
    pair = (device, way.device)
    carried = [link for link in relayed if set(link.devices) == set(pair)] if way.relayed else []
    halves = [link.latency_s for link in carried if link.latency_s is not None]
    return LinkStatus(
        devices=pair,
        relayed=way.relayed,
        carried_bytes=sum(link.carried_bytes for link in carried),
        latency_s=way.latency_s if not way.relayed else max(halves, default=None),
        streams=way.streams,
        bbr=way.bbr,
    )
