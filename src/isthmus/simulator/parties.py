"""Simulated devices of any program: processes that start, die, fall silent and go on, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from isthmus.fleet import Fleet
from isthmus.plans.plan import device_of
from isthmus.protocol.compute_lane import ComputeLane
from isthmus.simulator.clock import Jitter, VirtualClock
from isthmus.simulator.network import Network
from isthmus.simulator.options import SimulationOptions

Act = Callable[[], None]
WorkerT = TypeVar("WorkerT", bound="PartyWorker")


class PartyWorker(Protocol):
    """A worker of a device, as its coordinator knows it."""

    @property
    def name(self) -> str: ...


class Party(Generic[WorkerT]):
    """A device that runs. It is made anew when its process starts again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lane = ComputeLane()
        self.workers: dict[str, WorkerT] = {}
        self.died_s = math.inf
        self.waiting: list[Act] | None = None  # actions that follow once it goes on, while it is silent


class Parties(Generic[WorkerT]):
    """Time, devices and faults. A subclass has what one program's workers do. No decision is made here."""

    def __init__(self, options: SimulationOptions) -> None:
        self.clock = VirtualClock(options.seed)
        self.devices: dict[str, Party[WorkerT]] = {}  # those that run
        self.setting_up = False  # whether connecting and starting take time: before a run's first item they take none
        self._options = options
        self._factor = Jitter(options.jitter, options.seed)
        self._slow: dict[str, float] = {}
        self._cuts: dict[frozenset[str], float] = {}  # seconds until which nothing passes between two devices, by pair

    # What a program's world says

    def noticed(self, device: Party[WorkerT], after_s: Callable[[str], float], how: str) -> None:
        """Devices that have links to this one find them broken, each after so long."""

    def blame(self, name: str, other: str) -> None:
        """A device has heard nothing from another one for too long."""

    def reaches(self, worker_id: str) -> bool:
        """Whether the links of a worker's device to the coordinator are whole."""
        return True

    def dials(self, worker_id: str) -> bool:
        """Whether a worker that is not connected tries again."""
        return self.worker(worker_id) is not None

    def latency_s(self, source: str, target: str) -> float:
        """Seconds until one device notices what happens at the end of another one's link."""
        return 0.0

    # Time

    def later(self, seconds: float, lane: object, act: Act) -> None:
        self.clock.at(self.clock.now_s + seconds, str(lane) if not isinstance(lane, tuple) else lane, act)

    def on(self, device: Party[WorkerT], act: Act) -> None:
        """Now, or when the device goes on; never if it is gone."""
        if self.devices.get(device.name) is not device:
            return
        if device.waiting is not None:
            device.waiting.append(partial(self.on, device, act))
        else:
            act()

    def slow(self, device: str, factor: float) -> None:
        self._slow[device] = factor

    # What goes wrong

    def kill(self, name: str) -> Party[WorkerT] | None:
        """The device's process dies; returns what it was. Its neighbours notice."""
        device = self.devices.pop(name, None)
        if device is not None:
            device.died_s = self.clock.now_s
            self.noticed(device, lambda other: self.latency_s(other, name), "closed the connection")
        return device

    def silence(self, device: Party[WorkerT]) -> None:
        """The device does nothing from now on; after a while its neighbours give up."""
        device.waiting = []
        waiting = device.waiting

        def noticed() -> None:
            if device.waiting is waiting:
                self.noticed(device, lambda other: 0.0, f"is silent for {self._options.recovery.timeout_s:g} s")

        self.later(self._options.recovery.timeout_s, ("silent", device.name), noticed)

    def wake(self, device: Party[WorkerT]) -> None:
        waiting, device.waiting = device.waiting, None
        for act in waiting or ():
            act()

    def cut(self, one: str, other: str, lasts_s: float) -> None:
        """Nothing passes between two devices for so long."""
        now_s, timeout_s = self.clock.now_s, self._options.recovery.timeout_s
        self._cuts[frozenset((one, other))] = max(self.cut_until_s(one, other), now_s + lasts_s)
        if lasts_s < timeout_s:
            return
        for a, b in ((one, other), (other, one)):
            self.later(timeout_s, ("cut", a), partial(self.blame, a, b))

    def cut_until_s(self, one: str, other: str) -> float:
        """Until when nothing passes between two devices; 0 if their link is whole."""
        return self._cuts.get(frozenset((one, other)), 0.0) if self._cuts else 0.0

    def worker(self, worker_id: str) -> WorkerT | None:
        """If its device runs."""
        device = self.devices.get(device_of(worker_id))
        return device.workers.get(worker_id) if device is not None else None


class LinkedParties(Parties[WorkerT]):
    """Devices that send each other messages over the links of a fleet."""

    def __init__(self, fleet: Fleet, options: SimulationOptions) -> None:
        super().__init__(options)
        self._fleet = fleet
        self._network = Network(fleet, options.overheads.message_s, self._factor)

    def latency_s(self, source: str, target: str) -> float:
        return self._fleet.link(source, target).latency_s

    def bandwidth(self, source: str, target: str) -> float:
        return self._fleet.link(source, target).bandwidth_bytes_per_s
