"""The devices of a fleet: who is admitted, called to a run, waited for, asked, and out.

    connections, messages of devices ─► a member per device ─┐
    runs that open and close ────────────────────────────────┼─► instructions
    waits, questions, ticks ─────────────────────────────────┘

Pure: the host says what time it is with each event, and what the roster says. `membership` has the phases of a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import msgspec

from isthmus.plans.worker_ids import device_of
from isthmus.protocol.deadlines import MOST_NAMES
from isthmus.protocol.membership import FleetMember
from isthmus.protocol.membership_events import (
    AdmitDevice,
    AdmitWorker,
    AskToLeave,
    DeviceAnswered,
    DeviceAsked,
    DeviceCalled,
    DeviceConnected,
    DeviceDisconnected,
    DeviceRevoked,
    DrainRequested,
    EndWait,
    FailQuestion,
    FleetEvent,
    FleetInstruction,
    FleetNote,
    FleetTick,
    HoldWorker,
    PeerIdentified,
    PutQuestion,
    RefuseDevice,
    RefuseWorker,
    RunClosed,
    RunExpected,
    RunOpened,
    StopWorker,
    TakeAnswer,
    WaitBegan,
    WaitStopped,
    WorkerConnected,
    WorkerFailed,
)
from isthmus.units import format_duration

REMIND_S = 30.0
"""How often to log the awaited devices."""
REVOKED = "it was revoked"


class _Run(msgspec.Struct):
    opened: RunOpened
    failed: dict[str, str]
    """How each device's process ended, for those that failed."""
    leaving: set[str]
    """Devices that were asked to leave it while they worked for it: not called again, whatever connection they have."""


class _Wait(msgspec.Struct):
    devices: dict[str, None]
    every: bool
    began_s: float
    away: set[str]
    """Those of the devices that are not here: kept as they come and go, for there may be a thousand."""
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
    """Events in, instructions out. It has no last phase: a fleet goes on for as long as its host."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Names of the devices that were here and are not revoked, by id."""
        self._members: dict[str, FleetMember] = {}
        self._runs: dict[str, _Run] = {}
        self._expected, self._expected_until_s = "", 0.0
        self._waits: dict[int, _Wait] = {}
        self._revoked: frozenset[str] = frozenset()
        self._questions: dict[str, _Question] = {}
        self._out: list[FleetInstruction] = []

    # What is known

    @property
    def connected(self) -> frozenset[str]:
        return frozenset(name for name, member in self._members.items() if member.connected)

    @property
    def missing(self) -> frozenset[str]:
        """Devices that somebody waits for."""
        return frozenset(d for wait in self._waits.values() for d in wait.missing)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Devices without which a run does not begin, as is shown of them."""
        return tuple(dict.fromkeys(self._shown(d) for wait in self._waits.values() for d in wait.missing))

    def member(self, device: str) -> FleetMember | None:
        """To be read only."""
        return self._members.get(device)

    def at_work(self, device: str, run: str) -> bool:
        """Whether the device is connected, and a process of it works for the run or is called to it."""
        member = self._members.get(device)
        return member is not None and member.at_work and member.run == run

    def offers(self, devices: Iterable[str], run: str) -> list[str]:
        """Those of them that could be called to the run: they are connected, were not asked to leave it, and work for
        no run that goes on, or one that yields. Without a run: those that work for none."""
        here = [d for d in devices if self._is_here(d) and not self.leaves(d, run)]
        return [d for d in here if not self.at_work(d, run) and self._is_free(d, run)]

    def leaves(self, device: str, run: str) -> bool:
        """Whether the device was asked to leave the run: once its process has ended, the run gets it no more."""
        return run in self._runs and device in self._runs[run].leaving

    def failed(self, run: str) -> dict[str, str]:
        """How processes for the run have ended, by device."""
        found = self._runs.get(run)
        return dict(found.failed) if found is not None else {}

    # What happens

    def handle(self, event: FleetEvent, now_s: float) -> list[FleetInstruction]:
        """Take one event at this time, in seconds of whatever clock; return what to do now."""
        match event:
            case DeviceConnected():
                self._connect(event)
            case DeviceDisconnected() | DeviceCalled() | WorkerFailed() | DrainRequested() | DeviceRevoked():
                self._on_member(event)
            case WorkerConnected():
                self._admit_worker(event, now_s)
            case RunClosed():
                self._close_run(event)
            case PeerIdentified():
                self._identify(event)
            case RunOpened():
                self._open_run(event)
            case RunExpected(run=run, within_s=within_s):
                self._expected, self._expected_until_s = run, now_s + within_s
            case WaitBegan():
                self._revoked |= event.revoked
                away = {d for d in event.devices if not self._is_here(d)}
                self._waits[event.wait] = _Wait(dict.fromkeys(event.devices), event.every, now_s, away)
            case WaitStopped(wait=wait):
                self._waits.pop(wait, None)
            case DeviceAsked():
                self._ask(event, now_s)
            case DeviceAnswered(question=question, device=device):
                if (asked := self._questions.get(question)) is not None and asked.device == device:
                    del self._questions[question]
                    self._out.append(TakeAnswer(question))
            case FleetTick(revoked=revoked):
                self._revoked = revoked
                late = [q for q, asked in self._questions.items() if now_s >= asked.until_s]
                self._fail(late, "did not answer for {within_s:g} s")
        if isinstance(event, PeerIdentified | DeviceConnected | DeviceDisconnected | DeviceRevoked):
            self._count(event.name if isinstance(event, PeerIdentified) else event.device)
        self._look_at_waits(now_s)
        out, self._out = self._out, []
        return out

    # Members

    def _identify(self, event: PeerIdentified) -> None:
        name, member = event.name, self._members.get(event.name or "")
        if name is None or (member is not None and member.id == event.id and member.phase == "revoked"):
            self._refuse(event.id)
        elif member is None or member.id != event.id:  # the name's former device was revoked, or it could not have it
            if member is not None:
                self._revoke(member)
            self._members[name] = FleetMember(name, event.id)
            self.names[event.id] = name

    def _refuse(self, id: str) -> None:
        self._out.append(RefuseDevice("membership", f"device {id} is not in this fleet, or was revoked"))

    def _connect(self, event: DeviceConnected) -> None:
        device, member = event.device, self._of(event.device, event.id)
        if member is None:
            self._refuse(event.id)
        elif event.mismatch:
            self._out.append(RefuseDevice("version", event.mismatch))
        else:
            self._leave_unanswered(device)
            self._out += member.handle(event)
            runs = [run.opened for run in self._runs.values() if run.opened.long_lived]
            wanted = [run for run in runs if device in run.devices]
            idle = "" if wanted else "; ".join(map(_meant_for, runs))
            self._out.append(AdmitDevice(device, event.connection, idle))
            self._note(device, f"is here, and waits: {idle}" if idle else "is here")
            for run in wanted:
                self._call(device, run.run)

    def _on_member(
        self, event: DeviceDisconnected | DeviceCalled | WorkerFailed | DrainRequested | DeviceRevoked
    ) -> None:
        member = self._members.get(event.device)
        match event:
            case DrainRequested(device=device):
                self._out.append(AskToLeave(device))
                if member is not None and (run := self._runs.get(member.run)) is not None:
                    run.leaving.add(device)
            case DeviceCalled(device=device, run=run):
                self._call(device, run)
                return
            case DeviceDisconnected(device=device, connection=connection):
                if member is not None and member.connection == connection:
                    self._leave_unanswered(device)
                    self._note(device, "has left")
            case WorkerFailed(device=device, connection=connection, run=run, how=how):
                if member is not None and member.connection == connection and run in self._runs:
                    self._runs[run].failed[device] = how  # also where the device came back without its process
            case DeviceRevoked(id=id):
                if member is not None and member.id == id:
                    self._revoke(member)
                return
        if member is not None:
            self._out += member.handle(event)

    def _revoke(self, member: FleetMember) -> None:
        if member.phase == "revoked":
            return
        self._leave_unanswered(member.name)
        for run in self._runs.values():
            run.failed.setdefault(member.name, REVOKED)
        if member.connected:
            self._note(member.name, f"is out: {REVOKED}")
        self._out += member.handle(DeviceRevoked(device=member.name, id=member.id))
        self.names.pop(member.id, None)

    def _is_here(self, device: str) -> bool:
        member = self._members.get(device)
        return member is not None and member.connected

    def _of(self, device: str, id: str) -> FleetMember | None:
        """The device, unless it was revoked."""
        member = self._members.get(device)
        return member if member is not None and member.id == id and member.phase != "revoked" else None

    # Runs

    def _open_run(self, event: RunOpened) -> None:
        self._runs[event.run] = _Run(event, {}, set())
        if event.long_lived:
            for device in sorted(self.connected - set(event.devices)):
                self._out.append(FleetNote(f"{device} waits: {_meant_for(event)}"))
        for device in event.devices:
            self._call(device, event.run)

    def _call(self, device: str, run: str) -> None:
        member, wanted = self._members.get(device), self._runs.get(run)
        if member is None or wanted is None or member.phase == "revoked" or not self._is_free(device, run):
            return
        if self.leaves(device, run):
            return
        wanted.failed.pop(device, None)  # what is known to have ended is not at work
        self._out += member.handle(DeviceCalled(device=device, run=run))

    def _is_free(self, device: str, run: str) -> bool:
        """Whether the device works for no other run that goes on, or for one that yields to this run."""
        member = self._members.get(device)
        if member is None or member.run in ("", run):
            return member is not None
        return (other := self._runs.get(member.run)) is None or (other.opened.yields and bool(run))

    def _admit_worker(self, event: WorkerConnected, now_s: float) -> None:
        device, run = event.device, event.run
        member = self._members.get(device)
        known = member is not None and member.phase != "revoked" and device_of(event.worker) == device
        if member is not None and known and run in self._runs and self._is_free(device, run):
            self._out += [*member.handle(event), AdmitWorker()]
        elif known and run not in self._runs and run == self._expected and now_s < self._expected_until_s:
            self._out.append(HoldWorker())
        else:
            self._out.append(RefuseWorker())

    def _close_run(self, event: RunClosed) -> None:
        closed = self._runs.pop(event.run, None)
        if closed is None:
            return
        for device in (*closed.opened.devices, *closed.opened.others):
            if self._is_here(device):
                self._out.append(StopWorker(self._members[device].connection, event.run))
        for member in self._members.values():
            self._out += member.handle(event)

    # Waits and questions

    def _count(self, device: str | None) -> None:
        """For those who wait for this device, which has come or gone."""
        for wait in self._waits.values():
            if device in wait.away and self._is_here(device):
                wait.away.discard(device)
            elif device in wait.devices and not self._is_here(device):
                wait.away.add(device)

    def _look_at_waits(self, now_s: float) -> None:
        for number, wait in list(self._waits.items()):
            if not wait.goes_on:
                del self._waits[number]
                self._out.append(EndWait(number, tuple(filter(self._is_here, wait.devices))))
            elif wait.noted_s is None or (wait.every and now_s - wait.noted_s >= REMIND_S):
                wait.noted_s = now_s
                self._out.append(FleetNote(self._reminder(wait, wait.missing, now_s - wait.began_s)))

    def _reminder(self, wait: _Wait, missing: Collection[str], waited_s: float) -> str:
        few = list(itertools.islice(missing, MOST_NAMES))
        more = f" and {len(missing) - len(few)} more" if len(missing) > len(few) else ""
        names = ", ".join(map(self._shown, few)) + more
        if not wait.every:
            return f"waiting for one of {names} to join"
        since = f", for {format_duration(waited_s)}" if waited_s >= REMIND_S else ""
        return f"waiting for {names} to join ({len(wait.devices) - len(missing)} here){since}"

    def _shown(self, device: str) -> str:
        """A device that is missing. Of one that was revoked, waiting alone does not help."""
        return f"{device} ({REVOKED}: a new key and a ticket bring it back)" if device in self._revoked else device

    def _ask(self, event: DeviceAsked, now_s: float) -> None:
        self._questions[event.question] = _Question(event.device, now_s + event.within_s, event.within_s)
        if self._is_here(event.device):
            self._out.append(PutQuestion(event.question, self._members[event.device].connection))
        else:
            self._leave_unanswered(event.device)

    def _leave_unanswered(self, device: str) -> None:
        """Its connection is gone: whatever it was asked, it will not answer."""
        self._fail([q for q, asked in self._questions.items() if asked.device == device], "left before it answered")

    def _fail(self, questions: Iterable[str], why: str) -> None:
        for question in questions:
            asked = self._questions.pop(question)
            reason = why.format(within_s=asked.within_s)
            self._out.append(FailQuestion(question, f"device {asked.device!r}: {reason}"))

    def _note(self, device: str, what: str) -> None:
        self._out.append(FleetNote(f"{device} {what}", device))


def _meant_for(run: RunOpened) -> str:
    few = ", ".join(run.devices[:MOST_NAMES]) + (" ..." if len(run.devices) > MOST_NAMES else "")
    return f"the run is for {few}"
