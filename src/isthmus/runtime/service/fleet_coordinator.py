"""The fleet's coordinator: devices join, stay, and are called to work for runs.

One address for everything. Who shows no certificate can join with a ticket and do nothing else. A device keeps one
connection for as long as it is in the fleet (`DevicePresent`), and opens one more for each run that it works for
(`JoinRun`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import TypeVar

from isthmus.errors import PeerError, UserError
from isthmus.protocol.fleet_membership import Admission, Refusal
from isthmus.protocol.run_messages import PeerPath
from isthmus.runtime.coordinator.backend import DevicesAtWork, RunRequest
from isthmus.runtime.identity import Party
from isthmus.runtime.identity.authority import requested_key
from isthmus.runtime.identity.database import StoreError
from isthmus.runtime.identity.keys import id_of
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import (
    MOST_REQUEST_BYTES,
    DataCompared,
    DataDescribed,
    DevicePresent,
    Rejected,
    Renew,
    Renewed,
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
from isthmus.runtime.service.presence import Presence
from isthmus.runtime.service.status_file import CoordinatorStatus, remove_status, write_status
from isthmus.runtime.transport.acceptor import Acceptor, first_message
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.listener import Listener, allow_many_connections
from isthmus.runtime.transport.rate_limit import Rate, limited
from isthmus.runtime.transport.relay import Relay
from isthmus.runtime.transport.secure import Connection
from isthmus.training.engine_operators import EngineOperators

Answer = TypeVar("Answer", bound=Message)
ANSWERS = ExpectingDial | LinkTimes | MeasuredSpeed | DataDescribed | DataCompared
"""Answers of devices to questions."""
WATCH_S = 1.0
"""How often to check for revoked devices."""
BEAT_S = 0.5
"""How often a device that waits for an expected run gets a heartbeat."""
WITHOUT_WORK = Rate(5.0, 50.0)
"""A device that is in the fleet sends heartbeats, and sometimes a renewal."""


class FleetCoordinator:
    """Listens from `start` on. `log` gets one line for whatever a person may want to know; any thread."""

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
        """A device that was away for less than `renew_after_absence_s` needs no ticket when its certificate has
        ended."""
        self._state = state
        self._renew_after_absence_s = renew_after_absence_s
        self._timeout_s = timeout_s
        self._log = log
        self._presence = Presence(state.roster, log, timeout_s=timeout_s, cut=self._cut)
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self._channels: dict[str, set[SocketChannel]] = {}
        """All connections of each device, by id."""
        self._acceptors: dict[str, Acceptor] = {}
        """The acceptor of each run."""
        self._relay = Relay(timeout_s)
        self._brought_back = self._queued = frozenset[str]()
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._listener = Listener(
            host, port, identity=state.identity, timeout_s=timeout_s, unknown_peer=self._unknown_peer
        )
        self.port = self._listener.port

    def start(self) -> None:
        """UserError if the fleet's status cannot be written to the state folder."""
        allow_many_connections()
        write_status(self._state.folder, self.current_status())
        self._listener.start(self._on_connection)
        self._watching.start()

    def close(self) -> None:
        self._over.set()
        self._listener.close()
        if self._watching.ident is not None:
            self._watching.join(WATCH_S)
            remove_status(self._state.folder)
        self._presence.close()
        self._relay.close()
        for channel in [c for channels in self._channels.values() for c in channels]:
            channel.close()

    def __enter__(self) -> FleetCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def present(self) -> frozenset[str]:
        """Names of the devices that are connected."""
        return self._presence.names

    def ticket(self) -> str:
        """A new one, as text."""
        return self._state.ticket()

    def withdraw(self, ticket: str) -> None:
        """As `FleetState`."""
        self._state.withdraw(ticket)

    def devices_of(self, machine: str) -> list[str]:
        """Names of the devices that joined from a machine, sorted; it may have one of its own name, or one for each
        accelerator."""
        names = (member.name for member in self._state.roster.members() if member.revoked_s is None)
        return sorted(name for name in names if name.partition("/")[0] == machine)

    def revoke(self, device: str) -> None:
        """Shut out a device that joined. On return its connections are closed, and another may take its name."""
        member = self._state.roster.revoke(device, time.time())
        with self._presence.deciding() as membership:
            membership.revoke(member.name, member.id)
        self._cut(member.id)  # also what the membership has not seen yet

    def brings_back(self, devices: Iterable[str]) -> None:
        """Those of them that are lost will join again: a run that has too few devices waits for them."""
        self._brought_back = frozenset(devices)

    def are_queued(self, devices: Iterable[str]) -> None:
        """These wait for a node in the queue of their engine: a run that has too few devices waits for as long."""
        self._queued = frozenset(devices)

    def queued(self) -> frozenset[str]:
        return self._queued - self._presence.names

    def may_return(self, device: str) -> bool:
        """Whether a device that a run has lost can work for it again."""
        return device in self._presence.names or device in self._brought_back

    def wait_for(self, devices: Sequence[str], stop: Stop | None = None) -> None:
        """Until all of them are connected. Interrupted where that is to stop."""
        self._presence.wait(devices, stop or Stop(), every=True)

    def wait_for_any(self, devices: Sequence[str], stop: Stop) -> list[str]:
        """Those of them that are connected, once there is one. Interrupted where that is to stop."""
        return self._presence.wait(devices, stop, every=False)

    @property
    def survives_coordinator(self) -> bool:
        return True

    def expects_reconnect(self, run: str) -> None:
        """As `Backend`."""
        with self._presence.deciding() as membership:
            membership.expect_run(run, self._timeout_s)

    def asks(self, stop: Stop | None = None) -> FleetDataQueries:
        """As `Backend`."""
        return FleetDataQueries(self, stop or Stop())

    @property
    def computes(self) -> Mapping[str, EngineOperators]:
        """As `Backend`."""
        return self._presence.computes

    def idle(self, like: Collection[str]) -> list[str]:
        """As `Backend`."""
        return self._presence.idle(like)

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        """As `Backend`: waits until all devices of the call are here."""
        self.wait_for(call.devices, call.stop)
        with self._accepting(call.run, acceptor), self._presence.run(call):
            yield _FleetDevices(self, self._presence, call)

    @contextlib.contextmanager
    def long_lived_run(self, call: RunRequest, acceptor: Acceptor) -> Generator[None]:
        """Start a run on those of its devices that are connected, and on the others when they connect."""
        with self._accepting(call.run, acceptor), self._presence.run(call, long_lived=True):
            yield

    def leaving(self) -> list[str]:
        """Who was asked to leave, by whatever process (`isthmus drain`), since this was called last."""
        devices = self._state.take_leaving()
        with self._presence.deciding() as membership:
            for device in devices:
                membership.drain(device)
        return devices

    def ask(self, device: str, message: AnyMessage, kind: type[Answer], within_s: float) -> Answer:
        """Ask a device a question, which `run` names; return the answer. PeerError when it does not answer, or
        leaves."""
        answer = self._presence.ask(device, message, within_s)
        if not isinstance(answer, kind):
            raise PeerError(f"device {device!r}: sent {type(answer).__name__}, expected {kind.__name__}")
        return answer

    def id_of(self, device: str) -> str:
        """Return the id of a device that is connected. PeerError for any other."""
        return self._presence.id_of(device)

    def _unknown_peer(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, PeerError, StoreError):
            name = admit(connection, self._state.authority, self._state.roster, self._renew_after_absence_s)
            if name is not None:
                self._log(f"certificate for {name}")

    def _on_connection(self, channel: SocketChannel) -> None:
        party = channel.party
        assert party is not None, "the listener admits no unknown peer"
        with self._changed:
            self._channels.setdefault(party.id, set()).add(channel)
        name = None
        try:
            name = self._state.roster.name_of(party.id) if party.role == "device" else None
            with self._presence.deciding() as membership:
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
                self._relay.serve(channel, first, self._presence.names_by_id)
            elif first is not None and (run := self._acceptor(channel, first, name)) is not None:
                run.admit(channel, first)
        except (OSError, PeerError, StoreError) as e:
            self._presence.about(name or party.id, str(e))
        finally:
            channel.close()
            with self._changed:
                self._channels[party.id].discard(channel)

    def _acceptor(self, channel: SocketChannel, join: JoinRun, name: str) -> Acceptor | None:
        """Return the acceptor of the run, if the device may work for it. For a run that is expected a device waits
        here."""
        while (admission := self._admission(name, join)) == "held" and not self._over.is_set():
            channel.send(Heartbeat(run=join.run))
            with self._changed:
                self._changed.wait_for(lambda: join.run in self._acceptors, BEAT_S)
        with self._changed:
            return self._acceptors.get(join.run) if admission == "admitted" else None

    def _admission(self, name: str, join: JoinRun) -> Admission:
        with self._presence.deciding() as membership:
            return membership.admit_worker(name, join.device, join.run)

    @contextlib.contextmanager
    def _accepting(self, run: str, acceptor: Acceptor) -> Generator[None]:
        with self._changed:
            self._acceptors[run] = acceptor
            self._changed.notify_all()
        try:
            yield
        finally:
            del self._acceptors[run]

    def _stay(self, channel: SocketChannel, present: DevicePresent, name: str, party: Party) -> None:
        """For as long as the device stays connected."""
        lane = SendLane(channel, timeout_s=self._timeout_s, on_error=lambda _: channel.close())
        number = self._presence.connected(lane, channel, name, present)
        wrong = mismatch(versions_here(), present.versions) or ""
        try:
            with self._presence.deciding() as membership:
                refused = membership.connect(name, party.id, number, working=present.working, mismatch=wrong)
            if refused is not None:
                _refuse(channel, refused)
                raise PeerError(f"{channel.other}: refused: {refused.reason}")
            self._state.roster.seen(party.id, time.time())
            self._on_message(channel, lane, number, name, party)
        finally:
            self._presence.disconnected(name, number)

    def _on_message(self, channel: SocketChannel, lane: SendLane, number: int, name: str, party: Party) -> None:
        check = limited(WITHOUT_WORK, _only_fleet)
        while (received := channel.receive(check, idle_s=self._timeout_s)) is not None:
            message = received[0]
            if isinstance(message, Heartbeat):
                lane.put(Heartbeat(run=""))
            elif isinstance(message, Renew):
                lane.put(Renewed(run="", certificate=self._renewed(message.request, party)))
            elif isinstance(message, EndedMessage):
                self._check_member(name, party.id)
                how = message.how[:500]
                with self._presence.deciding() as membership:
                    membership.worker_failed(name, number, message.run, how)
            elif isinstance(message, ANSWERS):
                self._presence.answered(name, message)

    def _renewed(self, request: bytes, party: Party) -> bytes:
        if len(request) > MOST_REQUEST_BYTES or id_of(requested_key(request)) != party.id:
            raise PeerError(f"device {party.id}: asked for a certificate of another key")
        self._state.roster.seen(party.id, time.time())
        return self._state.authority.certify(request, "device")[1]

    def _watch(self) -> None:
        """Tell the membership of the time, and of revoked devices: any process may revoke them."""
        while not self._over.wait(WATCH_S):
            try:
                self._look()
            except Exception as e:  # a full disk, say: who is revoked must go all the same, once that is over
                self._log(f"checking the fleet failed: {type(e).__name__}: {e}")

    def _look(self) -> None:
        self._presence.tick()
        here = self._state.roster.here()  # one query, however many devices there are
        for id, name in dict(self._presence.names_by_id).items():
            if id not in here:
                self._check_member(name, id)
        self._state.renew()
        write_status(self._state.folder, self.current_status())

    def _check_member(self, name: str, id: str) -> None:
        if self._state.roster.name_of(id) is None:
            with self._presence.deciding() as membership:
                membership.revoke(name, id)

    def _cut(self, id: str) -> None:
        with self._changed:
            channels = list(self._channels.get(id, ()))
        for channel in channels:
            channel.close()
        self._relay.cut(id)

    def waiting_at_relay(self, run: str, id: str) -> int:
        """Connections of a device by which others may reach it for `run`."""
        return self._relay.waiting(run, id)

    def current_status(self) -> CoordinatorStatus:
        """Who is here, and how devices at work reach each other."""
        relayed = tuple(self._relay.links())
        return CoordinatorStatus(
            at_s=time.time(),
            port=self.port,
            devices=self._presence.devices(),
            links=self._presence.links(relayed),
            relayed=relayed,
            awaited=self._presence.awaited,
        )


class _FleetDevices:
    def __init__(self, service: FleetCoordinator, presence: Presence, call: RunRequest) -> None:
        self._service = service
        self._presence = presence
        self._call = call

    def ended(self) -> Mapping[str, str]:
        return self._presence.failed(self._call.run)

    def starting(self, device: str) -> bool:
        return self._presence.at_work(device, self._call.run)

    def returns(self, device: str) -> bool:
        return self._service.may_return(device) and not self._presence.leaves(device, self._call.run)

    def queued(self) -> frozenset[str]:
        return self._service.queued()

    def offers(self) -> list[str]:
        return self._presence.offers((*self._call.devices, *self._call.others), self._call.run)

    def leaving(self) -> list[str]:
        return [] if self._call.yields else self._service.leaving()  # each is said once, to the run that does not yield

    def linked(self, device: str, paths: Sequence[PeerPath]) -> None:
        self._presence.linked(device, self._call.run, paths)

    def bandwidth(self, source: str, target: str) -> float | None:
        """Measure the link by the two devices' agents, while their other processes work."""
        try:
            return probe_link(self._service, source, target, lambda _: None).bandwidth_bytes_per_s
        except (PeerError, UserError):  # one of them is not here
            return None

    def call(self, device: str) -> None:
        with self._presence.deciding() as membership:
            membership.call(device, self._call.run)


def _refuse(channel: SocketChannel, refused: Refusal) -> None:
    channel.send(Rejected(run="", about=refused.about, reason=refused.reason))


def _only_fleet(message: AnyMessage) -> None:
    expected = Heartbeat | Renew | EndedMessage | ANSWERS
    if not isinstance(message, expected) or message.tensors:
        raise PeerError(f"sent {type(message).__name__}, which a device without a run does not send")
