"""Faults strike devices, links and the coordinator of a simulated run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from isthmus.session.session import Observation
from isthmus.simulator.connections import Connections
from isthmus.simulator.options import Fault, SimulationOptions
from isthmus.simulator.parties import Parties


class Strikes:
    def __init__(
        self,
        world: Parties[Any],
        connections: Connections[Any],
        options: SimulationOptions,
        restart: Callable[[], None],
        *,
        sees: bool = True,
    ) -> None:
        """`restart` starts a coordinator that was away again. `sees`: whether it sees processes of devices."""
        self._world = world
        self._connections = connections
        self._options = options
        self._restart = restart
        self._sees = sees
        self._ended: dict[str, str] = {}
        self._called: set[str] = set()  # devices whose process is on its way
        self._returning: set[str] = set()
        self._offers: set[str] = set()
        self._leaving: set[str] = set()

    @property
    def answered(self) -> bool:
        """Return whether the coordinator is there."""
        return self._connections.answered

    def called(self, name: str) -> None:
        """The device's process is started."""
        self._ended.pop(name, None)
        self._called.add(name)

    def call(self, name: str, worker_id: str = "") -> None:
        """Start the device's process, which connects."""
        self.called(name)
        seconds = self._options.recovery.process_s
        self._world.later(seconds, ("call", worker_id or name), partial(self._connections.join, worker_id or name))

    def tick(self) -> Observation:
        """Return the coordinator's observation of the devices now."""
        if not self._sees:
            return Observation()
        here = frozenset(self._world.devices)
        self._called -= here
        leaving, self._leaving = frozenset(self._leaving), set()
        return Observation(
            ended={device: how for device, how in self._ended.items() if device not in here},
            starting=here | self._called,
            returning=frozenset(self._returning - here),
            offers=frozenset(self._offers - here - self._called),
            leaving=leaving,
        )

    def strike(self, fault: Fault) -> None:
        """Now."""
        match fault.kind:
            case "lost":
                self._kill(fault)
            case "silent":
                self._silence(fault)
            case "link":
                self._world.cut(fault.device, fault.other, fault.lasts_s)
            case "coordinator":
                if self._connections.answered:
                    self._connections.crash()
                    self._world.later(fault.lasts_s, "restart", self._restart)
            case "slow":
                self._world.slow(fault.device, fault.factor)
            case "join":
                self._offers.add(fault.device)
            case "leave":
                self._leaving.add(fault.device)
                self._offers.discard(fault.device)
                self._returning.discard(fault.device)

    def _kill(self, fault: Fault) -> None:
        name = fault.device
        device = self._world.kill(name)
        if device is None:
            return
        self._ended[name] = "its process was killed by SIGKILL"
        self._offers.discard(name)
        self._returning.discard(name)
        self._connections.closed(device, "its connection closed", self._connections.latency_s())
        if math.isfinite(fault.lasts_s):
            self._returning.add(name)
            self._world.later(fault.lasts_s, ("back", name), partial(self._offers.add, name))

    def _silence(self, fault: Fault) -> None:
        device = self._world.devices.get(fault.device)
        if device is None or device.waiting is not None:
            return
        self._world.silence(device)
        waiting, timeout_s = device.waiting, self._options.recovery.timeout_s

        def noticed() -> None:
            if device.waiting is waiting:
                self._connections.closed(device, f"silent for {timeout_s:g} s")

        def goes_on() -> None:
            if device.waiting is waiting:
                self._world.wake(device)

        self._world.later(timeout_s, ("notice", fault.device), noticed)
        if math.isfinite(fault.lasts_s):
            self._world.later(fault.lasts_s, ("wake", fault.device), goes_on)
