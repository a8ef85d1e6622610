"""One device of a fleet, as its coordinator sees it: whether it is connected, and which run it works for.

    absent ──connect──► idle ──call──► called ──admit_worker──► working
       ▲                 ▲ ▲              │                        │
       └── disconnect ───┘ └─ run over, or the worker failed ──────┴── drain ──► draining

A device works for one run at most. A revoked device is over: its key is refused for ever.

A device is absent as soon as its connection closes or is silent. A session first waits for a better explanation
(`isthmus.session.failures`): it hears how the device's process ended. The coordinator of a fleet has started no process
of a device, and knows only its connection. Absence ends no work: a process has a connection of its own to its run, and
the run's session decides whether the device is lost. A new connection replaces the old one, as at every acceptor of
devices that dial again: the device noticed first that the old one is dead.
"""

from __future__ import annotations

from typing import Protocol

from isthmus.protocol.run_messages import PeerPath
from isthmus.session.program import OVER, Policy

NO_CONNECTION = 0  # in place of a connection's number


class MemberPort(Protocol):
    """A member asks this of the coordinator."""

    def start_worker(self, device: str, connection: int, run: str) -> None:
        """Tell the device to start a process for the run."""

    def close_connection(self, connection: int) -> None:
        """Another connection of the device has taken its place."""

    def cut(self, id: str) -> None:
        """Close every connection of the device, whatever it is for."""


class FleetMember(Policy[MemberPort]):
    """One key's device. Calls about a former connection or another run are late."""

    def __init__(self, port: MemberPort, name: str, id: str) -> None:
        super().__init__("absent")
        self.port = port
        self.name = name
        self.id = id
        self.connection = NO_CONNECTION
        self.run = ""
        """The run that a process of the device works for, or is called to. It is kept while the device is absent: the
        process has a connection of its own."""
        self.paths: tuple[str, tuple[PeerPath, ...]] = ("", ())
        """A run, and how a process of the device got to others for it."""

    @property
    def connected(self) -> bool:
        return self.connection != NO_CONNECTION

    @property
    def at_work(self) -> bool:
        """Return whether the device is connected, and a process of it works for a run or is called to one."""
        return self.phase in ("called", "working", "draining")

    def connect(self, connection: int, working: str) -> None:
        """The device has a new connection. It says that a process of it works for the run `working`, if any."""
        if self.over:
            return
        former, self.connection = self.connection, connection
        if not working:
            self.phase = "idle"
        elif self.phase != "draining" or working != self.run:
            self.phase = "working"
        self.run = working
        if former != NO_CONNECTION:
            self.port.close_connection(former)

    def disconnect(self, connection: int) -> None:
        if not self._is_late(connection != self.connection):
            self.phase, self.connection = "absent", NO_CONNECTION

    def call(self, run: str) -> None:
        """A run wants the device. A device that drains is not called to its run again. One that works for it may be: it
        knows whether its process has ended."""
        if self.phase in ("absent", OVER) or (self.phase == "draining" and run == self.run):
            return
        if self.phase != "working" or run != self.run:
            self.phase, self.run = "called", run
        self.port.start_worker(self.name, self.connection, run)

    def admit_worker(self, run: str) -> None:
        """A process of the device joins the run, on a connection of its own."""
        if self.over:
            return
        self.run = run
        if self.phase in ("idle", "called"):
            self.phase = "working"

    def drain(self) -> None:
        """A person asks the device to leave its run without loss."""
        if self.at_work:
            self.phase = "draining"

    def worker_failed(self, connection: int, run: str) -> None:
        if not self._is_late(connection != self.connection or not run or run != self.run):
            self._stop_work()

    def close_run(self, run: str) -> None:
        if not self._is_late(run != self.run):
            self._stop_work()

    def revoke(self) -> None:
        """The roster has the device no more."""
        if not self.over:
            self.phase, self.connection, self.run = OVER, NO_CONNECTION, ""
            self.port.cut(self.id)

    def _is_late(self, late: bool) -> bool:
        self.stale += late
        return late or self.over

    def _stop_work(self) -> None:
        self.phase, self.run = "idle" if self.connected else "absent", ""
