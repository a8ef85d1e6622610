"""The devices of a fleet: who is admitted, called to a run, waited for, asked, and out.

    connections, messages of devices ─► a member per device ─┐
    runs that open and close ────────────────────────────────┼─► calls of the port
    waits, questions, ticks ─────────────────────────────────┘

Pure: the host says what time it is, and what the roster says.

One device of it, `FleetMember`: whether it is connected, and which run it works for.

    absent ──connect──► idle ──call──► called ──admit_worker──► working
       ▲                 ▲ ▲              │                        │
       └── disconnect ───┘ └─ run over, or the worker failed ──────┴── drain ──► draining

A device works for one run at most. A revoked device is over: its key is refused for ever.

A device is absent as soon as its connection closes or is silent. A session first waits for a better explanation
(`isthmus.session.session`): it hears how the device's process ended. The coordinator of a fleet has started no process
of a device, and knows only its connection. Absence ends no work: a process has a connection of its own to its run, and
the run's session decides whether the device is lost. A new connection replaces the old one, as at every acceptor of
devices that dial again: the device noticed first that the old one is dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from isthmus.plans.plan import device_of
from isthmus.protocol.run_messages import PeerPath
from isthmus.session.program import OVER, Policy
from isthmus.session.session import few
from isthmus.units import format_duration

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


REMIND_S = 30.0  # how often to log the awaited devices
REVOKED = "it was revoked"


class Refusal(NamedTuple):
    """Why the fleet does not take a device. Trying again is of no use."""

    about: Literal["membership", "version"]
    reason: str


Admission = Literal["admitted", "held", "refused"]
"""Whether the process of a device joins its run. One that is held asks again: the run opens soon."""


class FleetPort(MemberPort, Protocol):
    """The membership asks this of the coordinator."""

    def admit(self, device: str, connection: int, idle: str) -> None:
        """Tell the device that it is in the fleet. `idle`: why a run that goes on has nothing for it, in words."""

    def stop_worker(self, connection: int, run: str) -> None:
        """Tell the device that the run is over."""

    def end_wait(self, wait: int, devices: Sequence[str]) -> None:
        """Nobody needs to wait any more: these devices are here."""

    def put_question(self, question: str, connection: int) -> None:
        """Send the question to the device, and say `answered`."""

    def fail_question(self, question: str, reason: str) -> None:
        """No answer comes."""

    def note(self, text: str, device: str = "") -> None:
        """Tell people. A note about a device may come often."""


class _Run(msgspec.Struct):
    devices: Sequence[str]
    others: Sequence[str]
    long_lived: bool
    yields: bool
    failed: dict[str, str]  # how each device's process ended, for those that failed
    asked: list[str]  # devices that were asked to leave it, until its host hears of them
    leaving: set[str]
    """Devices that were asked to leave it while they worked for it: not called again, whatever connection they have."""


class _Wait(msgspec.Struct):
    devices: dict[str, None]
    every: bool
    began_s: float
    away: set[str]  # those of the devices that are not here: kept as they come and go, for there may be a thousand
    noted_s: float | None = None

    @property
    def missing(self) -> list[str]:
        """Devices without which the wait goes on."""
        return [d for d in self.devices if d in self.away] if self.goes_on else []

    @property
    def goes_on(self) -> bool:
        return bool(self.away) if self.every else len(self.away) == len(self.devices)


class _Question(msgspec.Struct, frozen=True):
    device: str
    until_s: float
    within_s: float


class FleetMembership:
    """Its host says `clock` before each other call. It has no last phase: a fleet goes on for as long as its host."""

    def __init__(self, port: FleetPort) -> None:
        self.port = port
        self.names: dict[str, str] = {}  # names of the devices that were here and are not revoked, by id
        self.brought_back: frozenset[str] = frozenset()
        """Devices that will join again if they are lost: a run that has too few devices waits for them."""
        self.in_queue: frozenset[str] = frozenset()
        """Devices that wait for a node in the queue of their engine: a run that has too few waits for as long."""
        self._members: dict[str, FleetMember] = {}
        self._runs: dict[str, _Run] = {}
        self._expected, self._expected_until_s = "", 0.0
        self._waits: dict[int, _Wait] = {}
        self._revoked: frozenset[str] = frozenset()
        self._questions: dict[str, _Question] = {}
        self._now_s = 0.0

    # What is known

    @property
    def connected(self) -> frozenset[str]:
        return frozenset(name for name, member in self._members.items() if member.connected)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Devices without which a run does not begin, as is shown of them."""
        return tuple(dict.fromkeys(self._shown(d) for wait in self._waits.values() for d in wait.missing))

    def member(self, device: str) -> FleetMember | None:
        """To be read only."""
        return self._members.get(device)

    @property
    def queued(self) -> frozenset[str]:
        """Devices in the queue of their engine that are not here."""
        return frozenset(d for d in self.in_queue if not self._is_here(d))

    @property
    def links(self) -> dict[str, tuple[PeerPath, ...]]:
        """Return how devices at work for a run that goes on have got to others."""
        members = [m for m in self._members.values() if m.run in self._runs and m.paths[0] == m.run]
        return {member.name: member.paths[1] for member in members}

    def works(self, device: str) -> bool:
        """Return whether a process of the device works for a run that goes on, or is called to it."""
        return device in self._members and self._members[device].run in self._runs

    def at_work(self, device: str, run: str) -> bool:
        """Return whether the device is connected, and a process of it works for the run or is called to it."""
        member = self._members.get(device)
        return member is not None and member.at_work and member.run == run

    def offers(self, devices: Iterable[str], run: str) -> list[str]:
        """Those of them that could be called to the run: they are connected, were not asked to leave it, and work for
        no run that goes on, or one that yields. Without a run: those that work for none."""
        here = [d for d in devices if self._is_here(d) and not self.leaves(d, run)]
        return [d for d in here if not self.at_work(d, run) and self._is_free(d, run)]

    def idle(self, like: Collection[str], kinds: Mapping[str, object]) -> list[str]:
        """Devices that work for no run, each of the same kind as all of `like`. `kinds`: by device; devices of equal
        kinds compute the same bits."""
        free = self.offers(sorted(self.connected), run="")
        return [device for device in free if all(kinds.get(device) == kinds.get(other) for other in like)]

    def returns(self, device: str, run: str) -> bool:
        """Return whether a device that the run has lost can work for it again."""
        return (self._is_here(device) or device in self.brought_back) and not self.leaves(device, run)

    def leaves(self, device: str, run: str) -> bool:
        """Return whether the device was asked to leave the run: once its process has ended, the run gets it no more."""
        return run in self._runs and device in self._runs[run].leaving

    def failed(self, run: str) -> dict[str, str]:
        """Return how processes for the run have ended, by device."""
        found = self._runs.get(run)
        return dict(found.failed) if found is not None else {}

    def clock(self, now_s: float) -> None:
        """Seconds of whatever clock."""
        self._now_s = now_s

    # What happens to devices

    def identify(self, id: str, name: str | None) -> Refusal | None:
        """A peer has shown a certificate of the fleet. `name` is as the roster has it: None for a peer that is no
        device, never joined, or was revoked."""
        member = self._members.get(name or "")
        if name is None or (member is not None and member.id == id and member.over):
            return _not_in_fleet(id)
        if member is None or member.id != id:
            if member is not None:  # the name's former device was revoked, or this one could not have it
                self.revoke(member.id)
            self._members[name] = FleetMember(self.port, name, id)
            self.names[id] = name
        return None

    def connect(
        self, device: str, id: str, connection: int, *, working: str = "", mismatch: str = ""
    ) -> Refusal | None:
        """The device says that it is here, on a connection that stays; its host numbers them from 1 on. `working`: the
        run that a process of the device works for already. `mismatch`: why the software of both sides cannot work
        together."""
        member = self._members.get(device)
        if member is None or member.id != id or member.over:
            return _not_in_fleet(id)
        if mismatch:
            return Refusal("version", mismatch)
        self._leave_unanswered(device)
        member.connect(connection, working)
        runs = {name: run for name, run in self._runs.items() if run.long_lived}
        wanted = [name for name, run in runs.items() if device in run.devices]
        idle = "" if wanted else "; ".join(map(_meant_for, runs.values()))
        self.port.admit(device, connection, idle)
        self.port.note(f"{device} is here{', and waits: ' if idle else ''}{idle}", device)
        for name in wanted:
            self.call(device, name)
        self._count(device)
        return None

    def disconnect(self, device: str, connection: int) -> None:
        """A connection closed, or was silent for too long."""
        if (member := self._members.get(device)) is not None:
            if member.connection == connection:
                self._leave_unanswered(device)
                self.port.note(f"{device} has left", device)
            member.disconnect(connection)
            self._count(device)

    def revoke(self, id: str) -> None:
        """The roster has the device no more."""
        if (name := self.names.pop(id, None)) is None:
            return
        self._leave_unanswered(name)
        for run in self._runs.values():
            run.failed.setdefault(name, REVOKED)
        if self._is_here(name):
            self.port.note(f"{name} is out: {REVOKED}", name)
        self._members[name].revoke()
        self._count(name)

    def drain(self, device: str) -> None:
        """A person asks the device to leave its run without loss."""
        if (member := self._members.get(device)) is not None:
            if (run := self._runs.get(member.run)) is not None:
                run.leaving.add(device)
                run.asked.append(device)
            member.drain()

    def take_leaving(self, run: str) -> list[str]:
        """Return the devices that were asked to leave the run since this was called last."""
        asked = self._runs[run].asked
        self._runs[run].asked = []
        return asked

    def worker_failed(self, device: str, connection: int, run: str, how: str) -> None:
        """The device says that its process for the run has ended otherwise than well."""
        if (member := self._members.get(device)) is not None:
            if member.connection == connection and run in self._runs:
                self._runs[run].failed[device] = how  # also where the device came back without its process
            member.worker_failed(connection, run)

    def admit_worker(self, device: str, worker: str, run: str) -> Admission:
        """A process of the device asks to join a run, on a connection of its own. `worker` is the name that it joins
        under: the device's, or that of one of its workers."""
        member = self._members.get(device)
        if member is None or member.over or device_of(worker) != device:
            return "refused"
        if run in self._runs and self._is_free(device, run):
            member.admit_worker(run)
            return "admitted"
        expected = run not in self._runs and run == self._expected and self._now_s < self._expected_until_s
        return "held" if expected else "refused"

    def linked(self, device: str, run: str, paths: Sequence[PeerPath]) -> None:
        """A process of the device, which works for the run, has got to others."""
        if (member := self._members.get(device)) is not None:
            member.paths = (run, tuple(paths))

    def _is_here(self, device: str) -> bool:
        member = self._members.get(device)
        return member is not None and member.connected

    # What happens to runs

    def open_run(
        self,
        run: str,
        devices: Sequence[str],
        others: Sequence[str] = (),
        *,
        long_lived: bool = False,
        yields: bool = False,
    ) -> None:
        """The devices are called now, and whenever they connect if the run is long-lived; others may be called later.
        A device that another run calls leaves a run that yields."""
        opened = self._runs[run] = _Run(devices, others, long_lived, yields, {}, [], set())
        if long_lived:
            for device in sorted(self.connected - set(devices)):
                self.port.note(f"{device} waits: {_meant_for(opened)}")
        for device in devices:
            self.call(device, run)

    def expect_run(self, run: str, within_s: float) -> None:
        """Devices may be at work for this run, which opens within that time."""
        self._expected, self._expected_until_s = run, self._now_s + within_s

    def call(self, device: str, run: str) -> None:
        """A run wants the device."""
        member, wanted = self._members.get(device), self._runs.get(run)
        if member is None or wanted is None or member.over or not self._is_free(device, run):
            return
        if not self.leaves(device, run):
            wanted.failed.pop(device, None)  # what is known to have ended is not at work
            member.call(run)

    def close_run(self, run: str) -> None:
        if (closed := self._runs.pop(run, None)) is not None:
            for device in (*closed.devices, *closed.others):
                if self._is_here(device):
                    self.port.stop_worker(self._members[device].connection, run)
            for member in self._members.values():
                member.close_run(run)

    def _is_free(self, device: str, run: str) -> bool:
        """Return whether the device works for no other run that goes on, or for one that yields to this run."""
        member = self._members.get(device)
        if member is None or member.run in ("", run):
            return member is not None
        return (other := self._runs.get(member.run)) is None or (other.yields and bool(run))

    # Waits and questions

    def begin_wait(
        self, wait: int, devices: Sequence[str], *, every: bool, revoked: frozenset[str] = frozenset()
    ) -> None:
        """Somebody needs all of the devices, or any of them. `revoked`: as in `tick`."""
        self._revoked |= revoked
        away = {d for d in devices if not self._is_here(d)}
        self._waits[wait] = _Wait(dict.fromkeys(devices), every, self._now_s, away)
        self._look_at_waits()

    def stop_wait(self, wait: int) -> None:
        self._waits.pop(wait, None)

    def ask(self, question: str, device: str, within_s: float) -> None:
        self._questions[question] = _Question(device, self._now_s + within_s, within_s)
        if self._is_here(device):
            self.port.put_question(question, self._members[device].connection)
        else:
            self._leave_unanswered(device)

    def answered(self, question: str, device: str) -> bool:
        """Return whether somebody waits for this device's answer."""
        asked = self._questions.get(question)
        if taken := asked is not None and asked.device == device:
            del self._questions[question]
        return taken

    def tick(self, revoked: frozenset[str] = frozenset()) -> None:
        """Time passes. `revoked`: names that the roster has as revoked."""
        self._revoked = revoked
        for question, asked in list(self._questions.items()):
            if self._now_s >= asked.until_s:
                self._fail(question, f"did not answer for {asked.within_s:g} s")
        self._look_at_waits()

    def _count(self, device: str) -> None:
        """For those who wait for this device, which has come or gone."""
        for wait in self._waits.values():
            if device in wait.away and self._is_here(device):
                wait.away.discard(device)
            elif device in wait.devices and not self._is_here(device):
                wait.away.add(device)
        self._look_at_waits()

    def _look_at_waits(self) -> None:
        """End waits, and remind of the others."""
        for number, wait in list(self._waits.items()):
            if not wait.goes_on:
                del self._waits[number]
                self.port.end_wait(number, tuple(filter(self._is_here, wait.devices)))
            elif wait.noted_s is None or (wait.every and self._now_s - wait.noted_s >= REMIND_S):
                wait.noted_s = self._now_s
                self.port.note(self._reminder(wait, self._now_s - wait.began_s))

    def _reminder(self, wait: _Wait, waited_s: float) -> str:
        missing, total = wait.missing, len(wait.devices)
        names = few([self._shown(d) for d in missing])
        if not wait.every:
            return f"waiting for one of {names} to join"
        since = f", for {format_duration(waited_s)}" if waited_s >= REMIND_S else ""
        return f"waiting for {names} to join ({total - len(missing)} of {total} are here){since}"

    def _shown(self, device: str) -> str:
        """A device that is missing. Of one that was revoked, waiting alone does not help."""
        return f"{device} ({REVOKED}: a new key and a ticket bring it back)" if device in self._revoked else device

    def _leave_unanswered(self, device: str) -> None:
        """Its connection is gone: whatever it was asked, it will not answer."""
        for question in [q for q, asked in self._questions.items() if asked.device == device]:
            self._fail(question, "left before it answered")

    def _fail(self, question: str, why: str) -> None:
        self.port.fail_question(question, f"device {self._questions.pop(question).device!r}: {why}")


def _not_in_fleet(id: str) -> Refusal:
    return Refusal("membership", f"device {id} is not in this fleet, or was revoked")


def _meant_for(run: _Run) -> str:
    return f"the run is for {few(run.devices)}"
