"""A session decides who takes part in a run: the same rule for every program.

    connections that open and close, failures, accusations ─┐
    processes that ended, time limits ──────────────────────┴─► failure detector ─► the program loses a device

A device is lost when it says so, or sends what no device can have to send. One whose connection closed is lost when
the exit of its process is known, which says more, or when that does not come. One that was called and does not come is
lost when its time is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal, NamedTuple

import msgspec

from isthmus.errors import IsthmusError, PeerError, StepError, UserError
from isthmus.plans.plan import device_of

AGAIN_S = 30.0  # after so long a device whose process failed is called again; twice as long each further time


class Calls:
    """The calls of one run."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._from_s: dict[str, float] = {}

    def due(self, offers: Collection[str], now_s: float) -> Iterator[str]:
        """Those of them that may be called now, by name."""
        return (device for device in sorted(offers) if now_s >= self._from_s.get(device, now_s))

    def failed(self, device: str, now_s: float) -> None:
        """A process of the device has ended other than well."""
        self._from_s[device] = now_s + AGAIN_S * 2 ** self._failures[device]
        self._failures[device] += 1


FIRST_S, MOST_S = 3.0, 30.0  # a wait is logged after FIRST_S, then after pauses that double up to MOST_S
MOST_NAMES = 8  # names in one line: a few are enough of a large cohort
WHAT = {
    "joining": "to join",
    "holding": "to stop",
    "recalling": "to come back",
    "planning": "for a plan",
    "placing": "to set up their stages",
    "settling": "to be at the same step",
}
BOUNDED: dict[str, str] = {"joining": "join", "holding": "stop", "recalling": "come back"}
"""Phases that take no longer than a message. In the other phases data are sent: the connection notices a device that
makes no progress or is silent."""
STARTING = 3.0
"""Factor on the time limit for joining while the device's process is known to run. Slow is not dead: on a machine with
ten times more work than it can do, importing torch takes a minute."""


def few(names: Sequence[str]) -> str:
    """Return the names, but of many only the first, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


class Waits:
    """Logs which devices are awaited, and for how long."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._what = ""
        self._since: dict[str, float] = {}
        self._next_s = 0.0
        self._pause_s = FIRST_S

    def look(
        self, what: str, whom: Collection[str], now_s: float, *, usual_s: float = 0.0, until: str = ""
    ) -> dict[str, float]:
        """To be called repeatedly with the devices that are awaited, `what` for. Returns since when, by device. A wait
        that is no longer than `usual_s` is not logged. `until` is the end of the log line."""
        if what != self._what or self._since.keys().isdisjoint(whom):
            self._what, self._since = what, {}
            self._pause_s = max(FIRST_S, usual_s)
            self._next_s = now_s + self._pause_s
        self._since = {device: self._since.get(device, now_s) for device in sorted(whom)}
        if self._since and now_s >= self._next_s:
            self._pause_s = min(2 * self._pause_s, max(MOST_S, usual_s))
            self._next_s = now_s + self._pause_s
            longest = sorted(self._since.items(), key=lambda wait: wait[1])
            waited = few([f"{device} for {now_s - since_s:.0f} s" for device, since_s in longest])
            self._log(f"waiting {what}: {waited}{until}")
        return self._since


class Deadlines:
    def __init__(self, timeout_s: float, start_s: float, log: Callable[[str], None]) -> None:
        """`start_s`: how long a device may take to start its process."""
        self._limits_s = {"joining": max(start_s, timeout_s), "holding": timeout_s, "recalling": timeout_s}
        self._phases = Waits(log)
        self._queue = Waits(log)
        self._items = Waits(log)
        self._item, self._waited_s, self._longest_s = -1, 0.0, 0.0
        """The number of the item that others have finished, the seconds that a device is behind with it, and the
        longest seconds that one was behind with an item before."""

    def missed(
        self, phase: str, awaited: Collection[str], now_s: float, starting: Callable[[str], bool] = lambda _: False
    ) -> Iterator[tuple[str, str]]:
        """The awaited devices that missed this phase's time limit, each with the reason. `starting` says whether a
        device's process runs, and may only be slow."""
        whom = awaited or (("the planner",) if phase == "planning" else ())
        since = self._phases.look(WHAT.get(phase, ""), whom, now_s)
        limit_s = self._limits_s.get(phase)
        if limit_s is None:
            return
        for device, since_s in since.items():
            late = now_s - since_s > limit_s
            allowed_s = limit_s * STARTING if late and phase == "joining" and starting(device) else limit_s
            if now_s - since_s > allowed_s:
                yield device, f"it did not {BOUNDED[phase]} within {allowed_s:g} s"

    def in_queue(self, devices: Collection[str], now_s: float) -> None:
        """Note that the run waits for these devices, and they for their engine: there is no time limit."""
        self._queue.look("for the engine to start what it has queued", devices, now_s)

    def lag(self, item: int, behind: Collection[str], now_s: float, what: str = "to finish what others have") -> None:
        """Note that these devices have not finished an item that others have, `what` in words. Stages of a pipeline end
        one after the other, so only a wait that is twice as long as the longest before is logged."""
        if item != self._item:
            self._longest_s = max(self._longest_s, self._waited_s)
            self._item = item
        since = self._items.look(what, behind, now_s, usual_s=2 * self._longest_s)
        self._waited_s = max((now_s - since_s for since_s in since.values()), default=0.0)


GRACE_S = 1.0  # how long to wait for a better explanation than the first one
EXIT_S = 10.0
"""How long to wait for the exit of a process that is known to run and whose connection closed. It ends in this moment,
and how it ended is the better explanation: on a machine that is busy it is heard of later than the grace is long."""
CLOSED = "its connection closed"  # why a device is lost of which nothing more is known
BROKEN = "connection lost"  # how its errors begin: one of them is what a process leaves that ends with unread bytes


class Loss(NamedTuple):
    """A device that is lost."""

    device: str
    reason: str
    cause: Literal["job", "device", "gone", "accuses"] = "gone"
    """The device said that the job is at fault, or itself; its process or connection is gone; or a link of it broke."""

    @property
    def permanent(self) -> bool:
        """Return whether it cannot work, however often it is asked."""
        return self.cause in ("job", "device")

    @property
    def failure(self) -> IsthmusError:
        """Return the failure as an error that names the device."""
        family = UserError if self.cause == "job" else PeerError
        return family(f"device {self.device!r}{' was lost' if self.cause == 'gone' else ''}: {self.reason}")


class FailureDetector:
    """Everything heard of devices that are gone, and the verdict."""

    def __init__(self, grace_s: float | None = None) -> None:
        """`grace_s`: how long a first explanation waits for one of another device (None: `GRACE_S`)."""
        self._grace_s = GRACE_S if grace_s is None else grace_s
        self._reported: list[Loss] = []
        self._failed: dict[str, str] = {}
        self._disconnected: dict[str, str] = {}
        self._silent: set[str] = set()
        """Those of which nothing more can be heard: their connection is gone, or never came."""
        self._accusers: dict[str, str] = {}
        self._since_s: dict[str, float] = {}  # when each of those that are disconnected or accuse was first looked at

    def reported(self, device: str, reason: str, *, of_job: bool = False) -> None:
        """The device said what went wrong on it, or sent what is wrong. `of_job`: all others would say the same."""
        self._reported.append(Loss(device, reason, "job" if of_job else "device"))

    def failed(self, device: str, reason: str) -> None:
        """The device said why its process ends; another one may do better."""
        self._failed.setdefault(device, reason)

    def disconnected(self, device: str, reason: str) -> None:
        """Its connection closed, or it fell silent, or did not come."""
        self._silent.add(device)
        self._disconnected.setdefault(device, reason)

    def accused(self, device: str, reason: str) -> None:
        """The device cannot go on because of another one."""
        self._accusers.setdefault(device, reason)

    def cleared(self, device: str) -> None:
        """Forget the device, which is out of the run, and all accusations: they are of the plan that is given up."""
        self._reported = [loss for loss in self._reported if loss.device != device]
        self._disconnected.pop(device, None)
        self._silent.discard(device)
        self._failed.pop(device, None)
        self._accusers.clear()
        self._since_s = {d: since_s for d, since_s in self._since_s.items() if d in self._disconnected}

    @property
    def certain(self) -> bool:
        """Return whether `decide` has a verdict already."""
        return bool(self._reported or self._failed)

    @property
    def pending(self) -> bool:
        """Return whether `decide` will have one."""
        return self.certain or bool(self._disconnected or self._accusers)

    def due_s(self, now_s: float) -> float | None:
        """Return when `decide` may have a verdict that it has not now, if nothing else is heard."""
        if self.certain:
            return now_s
        times_s = (since_s + wait_s for since_s in self._since_s.values() for wait_s in (self._grace_s, EXIT_S))
        return min((time_s for time_s in times_s if time_s > now_s), default=None)

    def suspects(self, device: str) -> bool:
        """Return whether the device is lost, or about to be."""
        reported = any(device == loss.device for loss in self._reported)
        return reported or device in self._failed or device in self._disconnected

    def silent(self, device: str) -> bool:
        """Return whether nothing more can be heard of the device."""
        return device in self._silent

    def decide(self, now_s: float, ended: Mapping[str, str], running: Set[str] = frozenset()) -> Loss | None:
        """The device that the run has lost, once that is clear. Asked again and again. `ended`: by device, how
        its process ended; `running`: devices whose process is not known to have ended."""
        if self._reported:
            return self._reported[0]
        for device, reason in self._failed.items():
            return Loss(device, reason)
        for device, how in ended.items():
            if device not in self._accusers:
                self._disconnected[device] = how  # says more than that its connection closed
        for device in (*self._disconnected, *self._accusers):
            self._since_s.setdefault(device, now_s)
        accused_s = min((self._since_s[device] for device in self._accusers), default=now_s)
        gone = [device for device in self._disconnected if device not in self._accusers]
        for device in gone:
            reason, waited_s = self._disconnected[device], now_s - min(self._since_s[device], accused_s)
            exits = reason.startswith((CLOSED, BROKEN)) and device in running and waited_s < EXIT_S
            grace_s = self._grace_s if device in self._silent else GRACE_S  # it may have sent why
            if waited_s >= grace_s and not exits:
                return Loss(device, reason)
        if gone or not self._accusers or now_s - accused_s < self._grace_s:
            return None
        # Both ends of a link that is cut may accuse each other. Which was heard first is chance.
        device, reason = min(self._accusers.items())
        return Loss(device, reason, "accuses")


def in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def reason_and_fault(error: Exception) -> tuple[str, Literal["user", "device", "other"]]:
    """Return the text and the fault by which a party reports an error that ends its work (`DeviceFailed`)."""
    text = in_one_line(error)
    if isinstance(error, PeerError):
        return text, "other"
    if isinstance(error, UserError | StepError):
        return text, "user"
    return text if isinstance(error, IsthmusError) else f"{type(error).__name__}: {text}", "device"


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

    def stop(self) -> None:
        """Somebody wants the run to end."""
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
