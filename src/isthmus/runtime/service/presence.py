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
        self._membership = FleetMembership(self)
        self._changed = threading.Condition()
        """Guards all attributes."""
        self._asked: list[Callable[[], object]] = []
        """Actions on connections that the membership asks for."""
        self._notes: list[tuple[str, str]] = []
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

    @contextlib.contextmanager
    def deciding(self) -> Generator[FleetMembership]:
        """Inside, tell the membership what happened. Connections get what it asks when it has decided. Lines of the log
        come last, and without the lock: a reader of them may be slow."""
        with self._changed:
            try:
                self._membership.clock(time.monotonic())
                yield self._membership
                asked, self._asked = self._asked, []
                for carry_out in asked:
                    carry_out()
            finally:
                self._changed.notify_all()
                notes, self._notes = self._notes, []
        for text, device in notes:
            if device:
                self._limiter.about(device, text)
            else:
                self._log(text)

    def _log(self, text: str) -> None:
        """A line that cannot be written, as the disk is full or nobody reads it, changes nothing for the fleet."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed
            self._write(text)

    def about(self, device: str, text: str) -> None:
        """A line about a device: not more than a person wants to read."""
        self._limiter.about(device, text)

    # The membership's port

    def admit(self, device: str, connection: int, idle: str) -> None:
        self._put(connection, Welcome(run="", device=device, timeout_s=self._timeout_s, idle=idle))

    def start_worker(self, device: str, connection: int, run: str) -> None:
        call = self._calls[run]
        stages = call.stages.get(device, 1)
        message = StartRun(
            run=run, timeout_s=call.timeout_s, threads=call.threads, stages=stages, replica=call.replicas
        )
        self._put(connection, message)

    def stop_worker(self, connection: int, run: str) -> None:
        self._put(connection, StopRun(run=run))

    def close_connection(self, connection: int) -> None:
        def close() -> None:
            lane, channel = self._lanes[connection]
            lane.close(0.0)
            channel.close()

        self._asked.append(close)

    def cut(self, id: str) -> None:
        self._asked.append(lambda: self._cut(id))

    def end_wait(self, wait: int, devices: Sequence[str]) -> None:
        self._over[wait] = list(devices)

    def put_question(self, question: str, connection: int) -> None:
        self._put(connection, self._questions[question][0])

    def fail_question(self, question: str, reason: str) -> None:
        self._questions[question][1].put(reason)

    def note(self, text: str, device: str = "") -> None:
        self._notes.append((text, device))

    def _put(self, connection: int, message: AnyMessage) -> None:
        self._asked.append(lambda: self._lanes[connection][0].put(message))

    def tick(self) -> None:
        """To be called repeatedly."""
        self._limiter.look()
        with self._changed:
            missing = self._membership.missing
        revoked = self._revoked(missing)
        with self.deciding() as membership:
            membership.tick(revoked)

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
            with self.deciding() as membership:
                membership.disconnect(device, number)
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
        with self.deciding() as membership:
            membership.open_run(call.run, call.devices, call.others, long_lived=long_lived, yields=call.yields)
        try:
            yield
        finally:
            with self.deciding() as membership:
                membership.close_run(call.run)
            del self._calls[call.run]

    def linked(self, device: str, run: str, paths: Sequence[PeerPath]) -> None:
        """How a device at work has got to others."""
        with self._changed:
            self._paths[device] = (run, tuple(paths))

    def failed(self, run: str) -> Mapping[str, str]:
        """How processes for the run have ended, by device."""
        with self._changed:
            return self._membership.failed(run)

    def at_work(self, device: str, run: str) -> bool:
        """Whether the device is connected, and a process of it works for the run or is called to it."""
        with self._changed:
            return self._membership.at_work(device, run)

    def leaves(self, device: str, run: str) -> bool:
        """Whether the device was asked to leave the run."""
        with self._changed:
            return self._membership.leaves(device, run)

    def offers(self, devices: Sequence[str], run: str) -> list[str]:
        """Those of them that could be called to the run."""
        with self._changed:
            return self._membership.offers(devices, run)

    def idle(self, like: Collection[str]) -> list[str]:
        """Devices that work for no run, of the hardware and engine that all of `like` are of."""
        with self._changed:
            free = self._membership.offers(sorted(self._membership.connected), run="")
            return [device for device in free if all(self._are_alike(device, other) for other in like)]

    def _are_alike(self, one: str, other: str) -> bool:
        return all(known.get(one) == known.get(other) for known in (self._hardware, self._computes))

    # Waits and questions

    def wait(self, devices: Sequence[str], stop: Stop, *, every: bool) -> list[str]:
        """The devices that are here, once all or any of them are, however long that takes: machines are started by
        people. Interrupted where that is to stop."""
        revoked = self._revoked(devices)
        with self.deciding() as membership:
            number = next(self._numbers)
            membership.begin_wait(number, devices, every=every, revoked=revoked)
        try:
            with self._changed:
                while number not in self._over:
                    stop.check()
                    self._changed.wait(LOOK_S)
                return self._over[number]
        finally:
            with self.deciding() as membership:
                membership.stop_wait(number)
                self._over.pop(number, None)

    def ask(self, device: str, message: AnyMessage, within_s: float) -> AnyMessage:
        """Ask the device a question, which `run` names; return the answer. PeerError when it does not answer, or
        leaves."""
        answers: queue.SimpleQueue[AnyMessage | str] = queue.SimpleQueue()
        with self.deciding() as membership:
            self._questions[message.run] = (message, answers)
            membership.ask(message.run, device, within_s)
        answer = answers.get()
        with self._changed:
            del self._questions[message.run]
        if isinstance(answer, str):
            raise PeerError(answer)
        return answer

    def answered(self, device: str, message: AnyMessage) -> None:
        with self.deciding() as membership:
            if membership.answered(message.run, device):
                self._questions[message.run][1].put(message)  # `ask` keeps it until an answer is there

    # What is shown

    @property
    def names(self) -> frozenset[str]:
        """Names of the devices that are connected."""
        with self._changed:
            return self._membership.connected

    @property
    def computes(self) -> dict[str, EngineOperators]:
        """Operators of the engines of devices that were here."""
        with self._changed:
            return dict(self._computes)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Devices without which a run does not begin, as is shown of them."""
        with self._changed:
            return self._membership.awaited

    @property
    def names_by_id(self) -> dict[str, str]:
        """Names of the devices that were here and are not revoked, by id; to be read only, it changes."""
        return self._membership.names

    def id_of(self, device: str) -> str:
        """PeerError for a device that is not here."""
        with self._changed:
            member = self._membership.member(device)
            if member is None or not member.connected:
                raise PeerError(f"device {device!r}: is not connected")
            return member.id

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Return the status of the devices that are here."""
        with self._changed:
            members = [self._membership.member(name) for name in sorted(self._membership.connected)]
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
                if run in self._calls and (member := self._membership.member(device)) is not None and member.run == run
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
