"""A session decides who takes part in a run: the same rule for every program.

    connections that open and close, failures, accusations ─┐
    processes that ended, time limits ──────────────────────┴─► failure detector ─► the program loses a device

A device is lost when it says so, or sends what no device can have to send. One whose connection closed is lost when
the exit of its process is known, which says more, or when that does not come. One that was called and does not come is
lost when its time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import msgspec

from isthmus.plans.plan import device_of
from isthmus.session.deadlines import Deadlines
from isthmus.session.failures import CLOSED, FailureDetector, Loss

TICK_S, SOON_S = 0.25, 0.05
"""How often a host looks at its devices, and where the exit of a process is about to be known."""
START_S = 60.0  # how long a device may take to start its process, on a machine that is busy
Fault = Literal["user", "device", "other"]
"""The blame for a failure that a device reports: the job or the data of its user, the device, or another one."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A host's view of the devices, by name, as time passes."""

    ended: Mapping[str, str] = {}  # whose process has ended otherwise than well, and how
    starting: frozenset[str] = frozenset()  # whose process is known to be there, or on its way
    returning: frozenset[str] = frozenset()  # who is expected among the offers if it is lost
    queued: frozenset[str] = frozenset()
    """A device that waits in the queue of an engine, and is expected among the offers whenever it has a node for it."""
    offers: frozenset[str] = frozenset()  # who could work and does not
    leaving: frozenset[str] = frozenset()  # who is to leave without loss, since the last tick


class Session:
    """A host calls `clock`, then what happened at that time. A subclass is one program's session."""

    def __init__(
        self, note: Callable[[str], None], *, timeout_s: float, start_s: float = 0.0, grace_s: float | None = None
    ) -> None:
        """`timeout_s`: for a message; `start_s`: for a process to come; `grace_s`: as `FailureDetector`. `note` gets a
        line for each long wait."""
        self.now_s = 0.0
        self.seen = Observation()  # when the host looked last
        self.connected: set[str] = set()  # worker ids; also of devices whose loss is not decided yet
        self._failures = FailureDetector(grace_s)
        self._deadlines = Deadlines(timeout_s, start_s, note)

    # What a program decides

    @property
    def over(self) -> bool:
        raise NotImplementedError

    @property
    def expected(self) -> Collection[str]:
        """Worker ids of devices that are called and have not come."""
        raise NotImplementedError

    @property
    def concerned(self) -> Collection[str]:
        """Those of whom a host is to know what their processes do."""
        return {*self.connected, *self.expected}

    def lost(self, loss: Loss) -> None:
        """The device is lost, with all its workers."""
        raise NotImplementedError

    def tries_again(self, device: str, reason: str) -> bool:
        """A link of the device broke, and nobody is lost. Return whether all go on as they are; else it is lost."""
        return False

    # What a host says

    @property
    def urgent(self) -> bool:
        """Return whether the host is to look at once."""
        return self._failures.certain

    @property
    def suspects(self) -> bool:
        """Return whether a device is about to be lost: the host is to look soon."""
        return self._failures.pending

    @property
    def due_s(self) -> float | None:
        """Return when the next look may decide something, if nothing else happens before."""
        return self._failures.due_s(self.now_s)

    def clock(self, now_s: float) -> None:
        """The time, in seconds of whatever clock."""
        self.now_s = now_s

    def is_here(self, device: str) -> bool:
        """Return whether messages to it make sense."""
        return device in self.connected and not self._failures.suspects(device_of(device))

    def disconnected(self, device: str, reason: str = CLOSED) -> None:
        """A device's connection closed, or it was silent for too long."""
        if not self.over:
            self._failures.disconnected(device_of(device), reason)

    def disbelieve(self, device: str, why: Exception | str) -> None:
        """The device sent what it cannot have to send."""
        self._failures.reported(device_of(device), str(why))

    def failed(self, device: str, reason: str, fault: Fault, *, starts_again: bool = False) -> None:
        """The device says that it cannot go on. `starts_again`: another process of it may do better."""
        if fault == "other":
            self._failures.accused(device, reason)
        elif starts_again:
            self._failures.failed(device, reason)
        else:
            self._failures.reported(device, reason, of_job=fault == "user")

    def looked(self, seen: Observation) -> None:
        """Time has passed: who is lost, and who could work."""
        if not self.over:
            self.seen = seen
            self.lose()

    # What a program may do

    def missed(self) -> Iterable[tuple[str, str]]:
        """Devices that missed a time limit, each with the reason."""
        expected = {device_of(worker_id) for worker_id in self.expected}
        return self._deadlines.missed("joining", expected, self.now_s, self.seen.starting.__contains__)

    def lose(self) -> bool:
        """Have the program lose those of whom it is clear now; return whether there were any."""
        for device, why in self.missed():
            self._failures.disconnected(device, why)
        found = False
        while not self.over:
            expected = self.expected
            ended = {d: how for d, how in self.seen.ended.items() if d in self.connected or d in expected}
            if (loss := self._failures.decide(self.now_s, ended, self.seen.starting)) is None:
                break
            found = True
            self._failures.cleared(loss.device)
            if loss.cause != "accuses" or not self.tries_again(loss.device, loss.reason):
                self.lost(loss)
        return found

    def forget(self, worker: str) -> None:
        """Hear nothing more of a worker's connection, and of accusations."""
        self.connected.discard(worker)
        self._failures.cleared(worker)
