"""Carries out what a fleet's membership decides: messages to devices, lines of the log, waits and answers."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

from isthmus.errors import PeerError
from isthmus.protocol.fleet_membership import FleetMembership
from isthmus.protocol.membership_events import (
    AdmitDevice,
    CloseConnection,
    CutDevice,
    DeviceAnswered,
    DeviceAsked,
    DeviceDisconnected,
    EndWait,
    FailQuestion,
    FleetEvent,
    FleetInstruction,
    FleetNote,
    FleetTick,
    PutQuestion,
    RunClosed,
    RunOpened,
    StartWorker,
    StopWorker,
    TakeAnswer,
    WaitBegan,
    WaitStopped,
)
from isthmus.protocol.run_messages import PeerPath
from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.identity.database import StoreError
from isthmus.runtime.identity.roster import Roster
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import MOST_HARDWARE, DevicePresent, StartRun, StopRun, Welcome
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.status_file import DeviceStatus, LinkStatus
from isthmus.runtime.transport.channel import Channel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.rate_limit import LogLimiter
from isthmus.runtime.transport.relay_status import RelayedLink
from isthmus.sanitize import sanitize
from isthmus.training.engine_operators import EngineOperators, engine_operators

LOOK_S = 1.0
"""How often a wait checks whether it is to stop."""
FLUSH_S = 1.0


class Presence:
    """The host of a `FleetMembership`; any thread. `cut` closes whatever connections a device has."""

    def __init__(
        self, roster: Roster, log: Callable[[str], None], *, timeout_s: float, cut: Callable[[str], None]
    ) -> None:
        self._roster = roster
        self._write = log
        self._limiter = LogLimiter(self._log)
        self._timeout_s = timeout_s
        self._cut = cut
        self._machine = FleetMembership()
        self._changed = threading.Condition()
        """Guards all attributes."""
        self._numbers = itertools.count(1)
        """Numbers of connections and waits."""
        self._lanes: dict[int, tuple[SendLane, Channel]] = {}
        """The lane and the channel of each connection."""
        self._calls: dict[str, RunRequest] = {}
        self._over: dict[int, list[str]] = {}
        """The devices that are here, by wait that is over."""
        self._questions: dict[str, tuple[AnyMessage, queue.SimpleQueue[AnyMessage | str]]] = {}
        self._hardware: dict[str, str] = {}
        """As the devices call it."""
        self._computes: dict[str, EngineOperators] = {}
        self._paths: dict[str, tuple[str, tuple[PeerPath, ...]]] = {}
        """The run that the device works for, and how it got to others."""

    def handle(self, event: FleetEvent) -> list[FleetInstruction]:
        """Carry out what is decided, and return it. Lines of the log come last, and without the lock: a reader
        of them may be slow."""
        with self._changed:
            try:
                decided = self._machine.handle(event, time.monotonic())
                for instruction in decided:
                    self._do(instruction)
            finally:
                self._changed.notify_all()
        for note in decided:
            if isinstance(note, FleetNote):
                self._tell(note)
        return decided

    def _tell(self, note: FleetNote) -> None:
        if note.device:
            self._limiter.about(note.device, note.text)
        else:
            self._log(note.text)

    def _log(self, text: str) -> None:
        """A line that cannot be written, as the disk is full or nobody reads it, changes nothing for the fleet."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed
            self._write(text)

    def _do(self, instruction: FleetInstruction) -> None:
        match instruction:
            case AdmitDevice(device=device, connection=connection, idle=idle):
                self._put(connection, Welcome(run="", device=device, timeout_s=self._timeout_s, idle=idle))
            case StartWorker(device=device, connection=connection, run=run):
                call = self._calls[run]
                stages = call.stages.get(device, 1)
                message = StartRun(
                    run=run, timeout_s=call.timeout_s, threads=call.threads, stages=stages, replica=call.replicas
                )
                self._put(connection, message)
            case StopWorker(connection=connection, run=run):
                self._put(connection, StopRun(run=run))
            case CloseConnection(connection=connection):
                lane, channel = self._lanes[connection]
                lane.close(0.0)
                channel.close()
            case CutDevice(id=id):
                self._cut(id)
            case EndWait(wait=wait, devices=devices):
                self._over[wait] = list(devices)
            case PutQuestion(question=question, connection=connection):
                self._put(connection, self._questions[question][0])
            case FailQuestion(question=question, reason=reason):
                self._questions[question][1].put(reason)
            case _:  # a line of the log, or the connection's own thread waits for the answer
                pass

    def _put(self, connection: int, message: AnyMessage) -> None:
        self._lanes[connection][0].put(message)

    def note(self, device: str, text: str) -> None:
        """A line about a device: not more than a person wants to read."""
        self._limiter.about(device, text)

    def tick(self) -> None:
        """To be called repeatedly."""
        self._limiter.look()
        with self._changed:
            missing = self._machine.missing
        self.handle(FleetTick(revoked=self._revoked(missing)))

    def _revoked(self, devices: frozenset[str] | Sequence[str]) -> frozenset[str]:
        with contextlib.suppress(StoreError):
            return frozenset(filter(self._roster.is_revoked, devices))
        return frozenset()

    # Connections

    def connected(self, lane: SendLane, channel: Channel, device: str, present: DevicePresent) -> int:
        """The number of a new connection that stays."""
        with self._changed:
            number = next(self._numbers)
            self._lanes[number] = (lane, channel)
            self._hardware[device] = sanitize(present.hardware)[:MOST_HARDWARE].strip()
            if present.computes is not None:
                alike = engine_operators(present.computes.engine)  # most are: kept once
                self._computes[device] = alike if alike == present.computes else present.computes
        return number

    def disconnected(self, device: str, number: int) -> None:
        try:
            self.handle(DeviceDisconnected(device=device, connection=number))
        finally:
            with self._changed:
                lane, _ = self._lanes.pop(number)
            lane.close(FLUSH_S)

    def close(self) -> None:
        for lane, _ in list(self._lanes.values()):
            lane.close(FLUSH_S)

    # Runs

    @contextlib.contextmanager
    def run(self, call: RunRequest, *, long_lived: bool = False) -> Generator[None]:
        """While inside, its devices are called."""
        self._calls[call.run] = call
        opened = RunOpened(
            run=call.run, devices=call.devices, others=call.others, long_lived=long_lived, yields=call.yields
        )
        self.handle(opened)
        try:
            yield
        finally:
            self.handle(RunClosed(run=call.run))
            del self._calls[call.run]

    def linked(self, device: str, run: str, paths: Sequence[PeerPath]) -> None:
        """How a device at work has got to others."""
        with self._changed:
            self._paths[device] = (run, tuple(paths))

    def failed(self, run: str) -> Mapping[str, str]:
        """How processes for the run have ended, by device."""
        with self._changed:
            return self._machine.failed(run)

    def at_work(self, device: str, run: str) -> bool:
        """Whether the device is connected, and a process of it works for the run or is called to it."""
        with self._changed:
            return self._machine.at_work(device, run)

    def leaves(self, device: str, run: str) -> bool:
        """Whether the device was asked to leave the run."""
        with self._changed:
            return self._machine.leaves(device, run)

    def offers(self, devices: Sequence[str], run: str) -> list[str]:
        """Those of them that could be called to the run."""
        with self._changed:
            return self._machine.offers(devices, run)

    def idle(self, like: Collection[str]) -> list[str]:
        """Devices that work for no run, of the hardware and engine that all of `like` are of."""
        with self._changed:
            free = self._machine.offers(sorted(self._machine.connected), run="")
            return [device for device in free if all(self._are_alike(device, other) for other in like)]

    def _are_alike(self, one: str, other: str) -> bool:
        return all(known.get(one) == known.get(other) for known in (self._hardware, self._computes))

    # Waits and questions

    def wait(self, devices: Sequence[str], stop: Stop, *, every: bool) -> list[str]:
        """The devices that are here, once all or any of them are, however long that takes: machines are started by
        people. Interrupted where that is to stop."""
        revoked = self._revoked(devices)
        with self._changed:
            number = next(self._numbers)
        self.handle(WaitBegan(wait=number, devices=tuple(devices), every=every, revoked=revoked))
        try:
            with self._changed:
                while number not in self._over:
                    stop.check()
                    self._changed.wait(LOOK_S)
                return self._over[number]
        finally:
            self.handle(WaitStopped(wait=number))
            with self._changed:
                self._over.pop(number, None)

    def ask(self, device: str, message: AnyMessage, within_s: float) -> AnyMessage:
        """Ask the device a question, which `run` names; return the answer. PeerError when it does not answer, or
        leaves."""
        answers: queue.SimpleQueue[AnyMessage | str] = queue.SimpleQueue()
        with self._changed:
            self._questions[message.run] = (message, answers)
        self.handle(DeviceAsked(question=message.run, device=device, within_s=within_s))
        answer = answers.get()
        with self._changed:
            del self._questions[message.run]
        if isinstance(answer, str):
            raise PeerError(answer)
        return answer

    def answered(self, device: str, message: AnyMessage) -> None:
        if TakeAnswer(message.run) in self.handle(DeviceAnswered(question=message.run, device=device)):
            self._questions[message.run][1].put(message)  # `ask` keeps it until an answer is there

    # What is shown

    @property
    def names(self) -> frozenset[str]:
        """Names of the devices that are connected."""
        with self._changed:
            return self._machine.connected

    @property
    def computes(self) -> dict[str, EngineOperators]:
        """Operators of the engines of devices that were here."""
        with self._changed:
            return dict(self._computes)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Devices without which a run does not begin, as is shown of them."""
        with self._changed:
            return self._machine.awaited

    @property
    def names_by_id(self) -> dict[str, str]:
        """Names of the devices that were here and are not revoked, by id; to be read only, it changes."""
        return self._machine.names

    def id_of(self, device: str) -> str:
        """PeerError for a device that is not here."""
        with self._changed:
            member = self._machine.member(device)
            if member is None or not member.connected:
                raise PeerError(f"device {device!r}: is not connected")
            return member.id

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Return the status of the devices that are here."""
        with self._changed:
            members = [self._machine.member(name) for name in sorted(self._machine.connected)]
            return tuple(
                DeviceStatus(
                    name=m.name, id=m.id, hardware=self._hardware.get(m.name, ""), working=m.run in self._calls
                )
                for m in members
                if m is not None
            )

    def links(self, relayed: Sequence[RelayedLink]) -> tuple[LinkStatus, ...]:
        """Return the status of connections between devices at work, some of which are relayed."""
        with self._changed:
            shown = {
                device: paths
                for device, (run, paths) in self._paths.items()
                if run in self._calls and (member := self._machine.member(device)) is not None and member.run == run
            }
        return tuple(_link_status(device, path, relayed) for device, paths in sorted(shown.items()) for path in paths)


def _link_status(device: str, path: PeerPath, relayed: Sequence[RelayedLink]) -> LinkStatus:
    pair = (device, path.device)
    carried = [link for link in relayed if set(link.devices) == set(pair)] if path.relayed else []
    halves = [link.latency_s for link in carried if link.latency_s is not None]
    return LinkStatus(
        devices=pair,
        relayed=path.relayed,
        carried_bytes=sum(link.carried_bytes for link in carried),
        latency_s=path.latency_s if not path.relayed else max(halves, default=None),
        streams=path.streams,
        bbr=path.bbr,
    )
