"""One device of a fleet, as its coordinator sees it: whether it is connected, and which run it works for.

    absent ──connected──► idle ──called──► called ──worker connected──► working
       ▲                   ▲ ▲               │                             │
       └── disconnected ───┘ └─ run over, or the worker failed ────────────┴── drain ──► draining

A new connection of a device replaces the old one: the device noticed first that the old one is dead. A device works for
one run at most. A revoked device is out for good: its key is refused for ever.
"""

from __future__ import annotations

from typing import Literal

from isthmus.protocol.machine import Machine, Transitions
from isthmus.protocol.membership_events import (
    CloseConnection,
    CutDevice,
    DeviceCalled,
    DeviceConnected,
    DeviceDisconnected,
    DeviceRevoked,
    DrainRequested,
    MemberEvent,
    MemberInstruction,
    RunClosed,
    StartWorker,
    WorkerConnected,
    WorkerFailed,
)

NO_CONNECTION = 0
"""In place of a connection's number."""


Phase = Literal["absent", "idle", "called", "working", "draining", "revoked"]

MEMBERSHIP = Transitions(
    "absent",
    "revoked",
    {
        "absent": {
            DeviceConnected: "idle working",
            DeviceCalled: "absent",
            WorkerConnected: "absent",
            DrainRequested: "absent",
            RunClosed: "absent",
            DeviceRevoked: "revoked",
        },
        "idle": {
            DeviceConnected: "idle working",
            DeviceDisconnected: "absent",
            DeviceCalled: "called",
            WorkerConnected: "working",
            DrainRequested: "idle",
            DeviceRevoked: "revoked",
        },
        "called": {
            DeviceConnected: "idle working",
            DeviceDisconnected: "absent",
            DeviceCalled: "called",
            WorkerConnected: "working",
            WorkerFailed: "idle",
            DrainRequested: "draining",
            RunClosed: "idle",
            DeviceRevoked: "revoked",
        },
        "working": {
            DeviceConnected: "idle working",
            DeviceDisconnected: "absent",
            DeviceCalled: "called working",
            WorkerConnected: "working",
            WorkerFailed: "idle",
            DrainRequested: "draining",
            RunClosed: "idle",
            DeviceRevoked: "revoked",
        },
        "draining": {
            DeviceConnected: "idle working draining",
            DeviceDisconnected: "absent",
            DeviceCalled: "called draining",
            WorkerConnected: "draining",
            WorkerFailed: "idle",
            DrainRequested: "draining",
            RunClosed: "idle",
            DeviceRevoked: "revoked",
        },
    },
)


class FleetMember(Machine[Phase, MemberEvent, MemberInstruction]):
    """One key's device. Late is what a former connection says, and what belongs to another run."""

    transitions = MEMBERSHIP

    def __init__(self, name: str, id: str) -> None:
        super().__init__()
        self.name = name
        self.id = id
        self.connection = NO_CONNECTION
        self.run = ""
        """That a process of the device works for, or is called to. It is kept while the device is absent: the process
        has a connection of its own."""

    @property
    def connected(self) -> bool:
        return self.connection != NO_CONNECTION

    @property
    def at_work(self) -> bool:
        """Whether the device is connected, and a process of it works for a run or is called to one."""
        return self._phase in ("called", "working", "draining")

    def _is_stale(self, event: MemberEvent) -> bool:
        match event:
            case DeviceDisconnected(connection=connection):
                return connection != self.connection
            case WorkerFailed(connection=connection, run=run):
                return connection != self.connection or not run or run != self.run
            case RunClosed(run=run):
                return run != self.run
            case _:
                return False

    def _take(self, event: MemberEvent) -> list[MemberInstruction]:
        match event:
            case DeviceConnected(connection=connection, working=working):
                return self._connect(connection, working)
            case DeviceDisconnected():
                self._phase, self.connection = "absent", NO_CONNECTION
            case DeviceCalled(run=run):
                return self._call(run)
            case WorkerConnected(run=run):
                self.run = run
                if self._phase in ("idle", "called"):
                    self._phase = "working"
            case DrainRequested():
                self._phase = "draining" if self.at_work else self._phase
            case WorkerFailed() | RunClosed():
                self._phase, self.run = "idle" if self.connected else "absent", ""
            case DeviceRevoked():
                self._phase, self.connection, self.run = "revoked", NO_CONNECTION, ""
                return [CutDevice(self.id)]
        return []

    def _connect(self, connection: int, working: str) -> list[MemberInstruction]:
        former, self.connection = self.connection, connection
        if not working:
            self._phase = "idle"
        elif self._phase != "draining" or working != self.run:
            self._phase = "working"
        self.run = working
        return [] if former == NO_CONNECTION else [CloseConnection(former)]

    def _call(self, run: str) -> list[MemberInstruction]:
        """A device that drains is not called to its run again. One that works for it may be: it knows whether its
        process has ended."""
        if self._phase == "absent" or (self._phase == "draining" and run == self.run):
            return []
        if self._phase != "working" or run != self.run:
            self._phase, self.run = "called", run
        return [StartWorker(self.name, self.connection, run)]
