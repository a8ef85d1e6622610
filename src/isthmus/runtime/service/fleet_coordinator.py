"""The fleet's coordinator: devices join, stay, and are called to work for runs.

One address for everything. Who shows no certificate can join with a ticket and do nothing else. A device keeps one
connection for as long as it is in the fleet (`DevicePresent`), and opens one more for each run that it works for
(`JoinRun`). `FleetMembership` decides what follows from what happens there.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from isthmus.errors import PeerError, UserError
from isthmus.protocol.fleet_membership import FleetMembership, Refusal
from isthmus.protocol.run_messages import PeerPath
from isthmus.runtime.coordinator.backend import DevicesAtWork, RunRequest
from isthmus.runtime.identity import Party
from isthmus.runtime.identity.database import StoreError
from isthmus.runtime.identity.keys import id_of, requested_key
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import (
    MOST_HARDWARE,
    MOST_REQUEST_BYTES,
    DataCompared,
    DataDescribed,
    DevicePresent,
    Rejected,
    Renew,
    Renewed,
    StartRun,
    StopRun,
    Welcome,
)
from isthmus.runtime.messages.fleet import ProcessEnded as EndedMessage
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.probe import ExpectingDial, LinkTimes, MeasuredSpeed
from isthmus.runtime.messages.run import Heartbeat, JoinRun, RelayConnect, RelayWait
from isthmus.runtime.messages.versions import mismatch, versions_here
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.data_queries import FleetDataQueries
from isthmus.runtime.service.enrollment import admit
from isthmus.runtime.service.fleet_probe import probe_link
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.service.status_file import CoordinatorStatus, DeviceStatus, LinkStatus, remove_status, write_status
from isthmus.runtime.transport.acceptor import Acceptor, LogLimiter, Rate, first_message, limited
from isthmus.runtime.transport.channel import Channel, SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.listener import Listener, allow_many_connections
from isthmus.runtime.transport.relay import Relay
from isthmus.runtime.transport.relay_status import RelayedLink
from isthmus.runtime.transport.secure import Connection
from isthmus.sanitize import MOST_SHOWN, sanitize
from isthmus.training.engine_operators import EngineOperators, engine_operators

Answer = TypeVar("Answer", bound=Message)
ANSWERS = ExpectingDial | LinkTimes | MeasuredSpeed | DataDescribed | DataCompared  # answers of devices to questions
REFUSED_S = 5.0  # for a device to read why it is refused
WATCH_S = 1.0  # how often to check for revoked devices
BEAT_S = 0.5  # how often a device that waits for an expected run gets a heartbeat
LOOK_S = 1.0  # how often a wait checks whether it is to stop
FLUSH_S = 1.0
WITHOUT_WORK = Rate(5.0, 50.0)  # a device that is in the fleet sends heartbeats, and sometimes a renewal


class DeviceKind(NamedTuple):
    """Devices of equal kinds compute the same bits."""

    hardware: str  # as the device calls it
    computes: EngineOperators | None


class FleetCoordinator:
    """The host and the port of a `FleetMembership`. It listens from `start` on.

    Unlike a `SessionHost` it has no thread that decides: any thread does, as what asks the membership waits for its
    answer, and as nothing here takes long.
    """

    def __init__(
        self,
        state: FleetState,
        host: str,
        port: int,
        *,
        timeout_s: float,
        log: Callable[[str], None],
        renew_after_absence_s: float = 0.0,
    ) -> None:
        """`log` gets one line for whatever a person may want to know. A device that was away for less than
        `renew_after_absence_s` needs no ticket when its certificate has ended."""
        self.state = state
        self._renew_after_absence_s = renew_after_absence_s
        self._timeout_s = timeout_s
        self._write = log
        self._limiter = LogLimiter(self._log)
        self.relay = Relay(timeout_s)
        self._membership = FleetMembership(self)
        self._changed = threading.Condition()
        """Guards the membership and the attributes below. Notified when a wait ends and when a run opens."""
        self._asked: list[Callable[[], object]] = []  # actions on connections that the membership asks for
        self._notes: list[tuple[str, str]] = []
        self._numbers = itertools.count(1)  # numbers of connections and waits
        self._lanes: dict[int, tuple[SendLane, Channel]] = {}  # the lane and the channel of each connection that stays
        self._kinds: dict[str, DeviceKind] = {}
        self._runs: dict[str, tuple[RunRequest, Acceptor]] = {}
        self._ended_waits: dict[int, list[str]] = {}  # the devices that are here, by wait that is over
        self._questions: dict[str, tuple[AnyMessage, queue.SimpleQueue[AnyMessage | str]]] = {}
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._listener = Listener(
            host, port, identity=state.identity, timeout_s=timeout_s, unknown_peer=self._unknown_peer
        )
        self.port = self._listener.port

    def start(self) -> None:
        """UserError if the fleet's status cannot be written to the state folder."""
        allow_many_connections()
        write_status(self.state.folder, self.current_status())
        self._listener.start(self._on_connection)
        self._watching.start()

    def close(self) -> None:
        self._over.set()
        self._listener.close()
        if self._watching.ident is not None:
            self._watching.join(WATCH_S)
            remove_status(self.state.folder)
        for lane, _ in list(self._lanes.values()):
            lane.close(FLUSH_S)
        self.relay.close()
        self._listener.cut()

    def __enter__(self) -> FleetCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def deciding(self) -> Generator[FleetMembership]:
        """Inside, ask the membership, or tell it what happened. Connections get what it asks when it has decided. Lines
        of the log come last, and without the lock: a reader of them may be slow."""
        with self._changed:
            try:
                self._membership.clock(time.monotonic())
                yield self._membership
                asked, self._asked = self._asked, []
                for carry_out in asked:
                    carry_out()
            finally:
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

    # What the membership asks

    def admit(self, device: str, connection: int, idle: str) -> None:
        self._put(connection, Welcome(run="", device=device, timeout_s=self._timeout_s, idle=idle))

    def start_worker(self, device: str, connection: int, run: str) -> None:
        call, _ = self._runs[run]
        stages = call.stages.get(device, 1)
        message = StartRun(run=run, timeout_s=call.timeout_s, threads=call.threads, stages=stages, role=call.role)
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
        self._ended_waits[wait] = list(devices)
        self._changed.notify_all()

    def put_question(self, question: str, connection: int) -> None:
        self._put(connection, self._questions[question][0])

    def fail_question(self, question: str, reason: str) -> None:
        self._questions[question][1].put(reason)

    def note(self, text: str, device: str = "") -> None:
        self._notes.append((text, device))

    def _put(self, connection: int, message: AnyMessage) -> None:
        self._asked.append(lambda: self._lanes[connection][0].put(message))

    def _cut(self, id: str) -> None:
        self._listener.cut(id)
        self.relay.cut(id)

    # What users of the fleet ask

    @property
    def present(self) -> frozenset[str]:
        """Names of the devices that are connected."""
        with self.deciding() as membership:
            return membership.connected

    def id_of(self, device: str) -> str:
        """Return the id of a device that is connected. PeerError for any other."""
        with self.deciding() as membership:
            member = membership.member(device)
            if member is None or not member.connected:
                raise PeerError(f"device {device!r}: is not connected")
            return member.id

    def revoke(self, device: str) -> None:
        """Shut out a device that joined. On return its connections are closed, and another may take its name."""
        member = self.state.roster.revoke(device, time.time())
        with self.deciding() as membership:
            membership.revoke(member.id)
        self._cut(member.id)  # also what the membership has not seen yet

    def wait_for(self, devices: Sequence[str], stop: Stop | None = None, *, every: bool = True) -> list[str]:
        """Return those that are connected, once all or any of them are, however long that takes: machines are started
        by people. Interrupted where that is to stop."""
        stop, revoked = stop or Stop(), self._revoked()
        with self.deciding() as membership:
            number = next(self._numbers)
            membership.begin_wait(number, devices, every=every, revoked=revoked)
        try:
            with self._changed:
                while number not in self._ended_waits:
                    stop.check()
                    self._changed.wait(LOOK_S)
                return self._ended_waits[number]
        finally:
            with self.deciding() as membership:
                membership.stop_wait(number)
                self._ended_waits.pop(number, None)

    def ask(self, device: str, message: AnyMessage, kind: type[Answer], within_s: float) -> Answer:
        """Ask a device a question, which `run` names; return the answer. PeerError when it does not answer, or
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
        if not isinstance(answer, kind):
            raise PeerError(f"device {device!r}: sent {type(answer).__name__}, expected {kind.__name__}")
        return answer

    def current_status(self) -> CoordinatorStatus:
        """Return who is here, and how devices at work reach each other."""
        relayed = tuple(self.relay.links())
        with self.deciding() as membership:
            members = [member for name in sorted(membership.connected) if (member := membership.member(name))]
            devices = tuple(
                DeviceStatus(
                    name=m.name, id=m.id, hardware=self._kinds[m.name].hardware, working=membership.works(m.name)
                )
                for m in members
            )
            links, awaited = membership.links, membership.awaited
        return CoordinatorStatus(
            at_s=time.time(),
            port=self.port,
            devices=devices,
            links=tuple(_link_status(d, path, relayed) for d, paths in sorted(links.items()) for path in paths),
            relayed=relayed,
            awaited=awaited,
        )

    # As `Backend`

    @property
    def survives_coordinator(self) -> bool:
        return True

    def expects_reconnect(self, run: str) -> None:
        with self.deciding() as membership:
            membership.expect_run(run, self._timeout_s)

    def asks(self, stop: Stop | None = None) -> FleetDataQueries:
        return FleetDataQueries(self, stop or Stop())

    @property
    def computes(self) -> Mapping[str, EngineOperators]:
        with self._changed:
            return {name: kind.computes for name, kind in self._kinds.items() if kind.computes is not None}

    def idle(self, like: Collection[str]) -> list[str]:
        with self.deciding() as membership:
            return membership.idle(like, self._kinds)

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        """Waits until all devices of the call are here."""
        self.wait_for(call.devices, call.stop)
        with self._opened(call, acceptor, long_lived=False):
            yield _FleetDevices(self, call)

    def long_lived_run(self, call: RunRequest, acceptor: Acceptor) -> contextlib.AbstractContextManager[None]:
        """Start a run on those of its devices that are connected, and on the others when they connect."""
        return self._opened(call, acceptor, long_lived=True)

    @contextlib.contextmanager
    def _opened(self, call: RunRequest, acceptor: Acceptor, *, long_lived: bool) -> Generator[None]:
        with self.deciding() as membership:
            self._runs[call.run] = call, acceptor
            membership.open_run(call.run, call.devices, call.others, long_lived=long_lived, yields=call.yields)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self.deciding() as membership:
                membership.close_run(call.run)
                del self._runs[call.run]

    # Connections

    def _unknown_peer(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, PeerError, StoreError):
            name = admit(connection, self.state.authority, self.state.roster, self._renew_after_absence_s)
            if name is not None:
                self._log(f"certificate for {name}")

    def _on_connection(self, channel: SocketChannel) -> None:
        party = channel.party
        assert party is not None, "the listener admits no unknown peer"
        name = None
        try:
            name = self.state.roster.name_of(party.id) if party.role == "device" else None
            with self.deciding() as membership:
                refused = membership.identify(party.id, name)
            if refused is not None:
                _refuse(channel, refused)
            if refused is not None or name is None:
                return
            channel.other = f"device {name!r}"
            first = first_message(channel, (DevicePresent, JoinRun, RelayWait, RelayConnect), self._timeout_s)
            if isinstance(first, DevicePresent):
                self._stay(channel, first, name, party)
            elif isinstance(first, RelayWait | RelayConnect):
                self.relay.serve(channel, first, self._membership.names)
            elif first is not None and (run := self._acceptor(channel, first, name)) is not None:
                run.admit(channel, first)
        except (OSError, PeerError, StoreError) as e:
            self._limiter.about(name or party.id, str(e))
        finally:
            channel.close()

    def _acceptor(self, channel: SocketChannel, join: JoinRun, name: str) -> Acceptor | None:
        """Return the acceptor of the run, if the device may work for it. For a run that is expected a device waits
        here."""
        while True:
            with self.deciding() as membership:
                admission = membership.admit_worker(name, join.device, join.run)
                if admission == "admitted":
                    return self._runs[join.run][1]
            if admission == "refused" or self._over.is_set():
                return None
            channel.send(Heartbeat(run=join.run))
            with self._changed:
                self._changed.wait_for(lambda: join.run in self._runs, BEAT_S)

    def _stay(self, channel: SocketChannel, present: DevicePresent, name: str, party: Party) -> None:
        """For as long as the device stays connected."""
        lane = SendLane(channel, timeout_s=self._timeout_s, on_error=lambda _: channel.close())
        with self.connection(lane, channel, name, party.id, present) as (number, refused):
            if refused is not None:
                _refuse(channel, refused)
                raise PeerError(f"{channel.other}: refused: {refused.reason}")
            self.state.roster.seen(party.id, time.time())
            self._receive(channel, lane, number, name, party)

    @contextlib.contextmanager
    def connection(
        self, lane: SendLane, channel: Channel, device: str, id: str, present: DevicePresent
    ) -> Generator[tuple[int, Refusal | None]]:
        """The number of a connection that stays while inside, unless the device is refused."""
        wrong = mismatch(versions_here(), present.versions) or ""
        computes = present.computes
        if computes is not None and computes == (alike := engine_operators(computes.engine)):
            computes = alike  # most are: kept once
        kind = DeviceKind(sanitize(present.hardware)[:MOST_HARDWARE].strip(), computes)
        with self._changed:
            number = next(self._numbers)
            self._lanes[number] = (lane, channel)
        try:
            with self.deciding() as membership:
                refused = membership.connect(device, id, number, working=present.working, mismatch=wrong)
                if refused is None:
                    self._kinds[device] = kind
            yield number, refused
        finally:
            try:
                with self.deciding() as membership:
                    membership.disconnect(device, number)
            finally:
                with self._changed:
                    del self._lanes[number]
                lane.close(FLUSH_S)

    def _receive(self, channel: SocketChannel, lane: SendLane, number: int, name: str, party: Party) -> None:
        check = limited(WITHOUT_WORK, _only_fleet)
        while (received := channel.receive(check, idle_s=self._timeout_s)) is not None:
            message = received[0]
            if isinstance(message, Heartbeat):
                lane.put(Heartbeat(run=""))
            elif isinstance(message, Renew):
                lane.put(Renewed(run="", certificate=self._renewed(message.request, party)))
            elif isinstance(message, EndedMessage):
                revoked = self.state.roster.name_of(party.id) is None
                with self.deciding() as membership:
                    if revoked:
                        membership.revoke(party.id)
                    membership.worker_failed(name, number, message.run, sanitize(message.how)[:MOST_SHOWN])
            elif isinstance(message, ANSWERS):
                self.answered(name, message)

    def answered(self, device: str, message: AnyMessage) -> None:
        """A device has sent an answer."""
        with self.deciding() as membership:
            if membership.answered(message.run, device):
                self._questions[message.run][1].put(message)  # `ask` keeps it until an answer is there

    def _renewed(self, request: bytes, party: Party) -> bytes:
        if len(request) > MOST_REQUEST_BYTES or id_of(requested_key(request)) != party.id:
            raise PeerError(f"device {party.id}: asked for a certificate of another key")
        self.state.roster.seen(party.id, time.time())
        return self.state.authority.certify(request, "device")[1]

    # As time passes

    def _watch(self) -> None:
        """Tell the membership of the time, and of revoked devices: any process may revoke them."""
        while not self._over.wait(WATCH_S):
            try:
                self._look()
            except Exception as e:  # a full disk, say: who is revoked must go all the same, once that is over
                self._log(f"checking the fleet failed: {type(e).__name__}: {e}")

    def _look(self) -> None:
        self._limiter.look()
        with self.deciding() as membership:
            ids = set(membership.names)
        revoked = self._revoked()
        with self.deciding() as membership:
            membership.tick(revoked)
        gone = ids - self.state.roster.here()  # one query, however many devices there are
        with self.deciding() as membership:
            for id in gone:
                membership.revoke(id)
        self.state.renew()
        write_status(self.state.folder, self.current_status())

    def _revoked(self) -> frozenset[str]:
        with contextlib.suppress(StoreError):
            return self.state.roster.revoked_names()
        return frozenset()


class _FleetDevices(DevicesAtWork):
    def __init__(self, service: FleetCoordinator, call: RunRequest) -> None:
        self._service = service
        self._call = call

    def ended(self) -> Mapping[str, str]:
        with self._service.deciding() as membership:
            return membership.failed(self._call.run)

    def starting(self, device: str) -> bool:
        with self._service.deciding() as membership:
            return membership.at_work(device, self._call.run)

    def returns(self, device: str) -> bool:
        with self._service.deciding() as membership:
            return membership.returns(device, self._call.run)

    def queued(self) -> frozenset[str]:
        with self._service.deciding() as membership:
            return membership.queued

    def offers(self) -> list[str]:
        with self._service.deciding() as membership:
            others = membership.connected if self._call.anyone else self._call.others
            return membership.offers((*self._call.devices, *others), self._call.run)

    def leaving(self) -> list[str]:
        """Return who was asked to leave, by whatever process (`isthmus drain`): each is said once, to the run that it
        works for, which does not yield."""
        asked = self._service.state.take_leaving()
        with self._service.deciding() as membership:
            for device in asked:
                membership.drain(device)
            return [] if self._call.yields else membership.take_leaving(self._call.run)

    def linked(self, device: str, paths: Sequence[PeerPath]) -> None:
        with self._service.deciding() as membership:
            membership.linked(device, self._call.run, paths)

    def bandwidth(self, source: str, target: str) -> float | None:
        """Measure the link by the two devices' agents, while their other processes work."""
        try:
            return probe_link(self._service, source, target, lambda _: None).bandwidth_bytes_per_s
        except (PeerError, UserError):  # one of them is not here
            return None

    def call(self, device: str) -> None:
        with self._service.deciding() as membership:
            membership.call(device, self._call.run)


def _link_status(device: str, path: PeerPath, relayed: Sequence[RelayedLink]) -> LinkStatus:
    """Return the status of a device's way to another one. `relayed`: all connections that are relayed now."""
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


def _refuse(channel: SocketChannel, refused: Refusal) -> None:
    """Say why, and wait until that was read: a device that does not know calls again and again."""
    channel.send(Rejected(run="", about=refused.about, reason=refused.reason))
    channel.linger(REFUSED_S)


def _only_fleet(message: AnyMessage) -> None:
    expected = Heartbeat | Renew | EndedMessage | ANSWERS
    if not isinstance(message, expected) or message.tensors:
        raise PeerError(f"sent {type(message).__name__}, which a device without a run does not send")
