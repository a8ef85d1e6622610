"""The fleet's coordinator: devices join, stay, and are called to work for runs.

One address for everything. Who shows no certificate can join with a ticket and do nothing else. A device keeps one
connection for as long as it is in the fleet (`DevicePresent`), and opens one more for each run that it works for
(`JoinRun`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from isthmus.errors import PeerError, UserError
from isthmus.plans.worker_ids import device_of
from isthmus.protocol.deadlines import MOST_NAMES
from isthmus.protocol.run_messages import PeerPath
from isthmus.runtime.coordinator.backend import RunRequest, Session
from isthmus.runtime.identity import Party
from isthmus.runtime.identity.authority import requested_key
from isthmus.runtime.identity.database import StoreError
from isthmus.runtime.identity.keys import id_of
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.data import DataCompared, DataDescribed
from isthmus.runtime.messages.fleet import (
    MOST_REQUEST_BYTES,
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
from isthmus.runtime.messages.relay import RelayConnect, RelayWait
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.messages.versions import mismatch, versions_here
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.data_queries import FleetDataQueries
from isthmus.runtime.service.enrollment import admit
from isthmus.runtime.service.fleet_probe import probe_link
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.service.log_limiter import LogLimiter
from isthmus.runtime.service.presence import REVOKED, Presence
from isthmus.runtime.service.status_file import CoordinatorStatus, remove_status, write_status
from isthmus.runtime.transport.acceptor import Acceptor, first_message
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.rate_limit import RateLimit
from isthmus.runtime.transport.relay import Relay
from isthmus.runtime.transport.secure import Connection

Answer = TypeVar("Answer", bound=Message)
ANSWERS = ExpectingDial | LinkTimes | MeasuredSpeed | DataDescribed | DataCompared
"""Of devices that were asked something."""
WATCH_S = 1.0
"""How often to check for revoked devices."""
BEAT_S = 0.5
"""How often a device that waits for an expected run gets a heartbeat."""
MOST_MESSAGES_PER_S = 5.0
"""From a device without work. It sends heartbeats, and sometimes a renewal."""
MOST_AT_ONCE = 50.0


class FleetCoordinator:
    """Listens from `start` on. `log` gets one line for whatever a person may want to know; any thread."""

    def __init__(
        self, state: FleetState, host: str, port: int, *, timeout_s: float, log: Callable[[str], None]
    ) -> None:
        self._state = state
        self._timeout_s = timeout_s
        self._log = log
        self._log_limiter = LogLimiter(log)
        self._presence = Presence(state.roster, log)
        self._changed = threading.Condition()
        """Of what is below."""
        self._shutting_out = threading.Lock()
        self._channels: dict[str, set[SocketChannel]] = {}
        """By id, all connections."""
        self._runs: dict[str, Acceptor] = {}
        self._long_lived_runs: dict[str, RunRequest] = {}
        self._ended: dict[str, dict[str, str]] = {}
        """By run and name: how the device's process ended."""
        self._asked: dict[str, tuple[str, queue.SimpleQueue[AnyMessage]]] = {}
        """By probe: who is to answer, and to whom."""
        self._names: dict[str, str] = {}
        """By id, of all that were here."""
        self._relay = Relay(timeout_s)
        self._expected, self._expected_until_s = "", 0.0
        """A run that devices are at work for, and that is not called yet."""
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._listener = Listener(
            host, port, identity=state.identity, timeout_s=timeout_s, unknown_peer=self._unknown_peer
        )
        self.port = self._listener.port

    def start(self) -> None:
        """UserError if the fleet's status cannot be written to the state folder."""
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
        self._state.roster.revoke(device, time.time())
        self._shut_out()

    def wait_for(self, devices: Sequence[str], stop: Stop | None = None) -> None:
        """As `Presence`."""
        self._presence.wait_for(devices, stop or Stop())

    def wait_for_any(self, devices: Sequence[str], stop: Stop) -> list[str]:
        """As `Presence`."""
        return self._presence.wait_for_any(devices, stop)

    @property
    def survives_coordinator(self) -> bool:
        return True

    def expects_reconnect(self, run: str) -> None:
        """As `Backend`."""
        self._expected, self._expected_until_s = run, time.monotonic() + self._timeout_s

    def asks(self, stop: Stop | None = None) -> FleetDataQueries:
        """As `Backend`."""
        return FleetDataQueries(self, stop or Stop())

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[Session]:
        """As `Backend`: waits until all devices of the call are here."""
        self.wait_for(call.devices, call.stop)
        self._ended[call.run] = {}
        self._receive(call.run, acceptor)
        try:
            work = _FleetSession(self, self._presence, call)
            for device in call.devices:
                work.call(device)
            yield work
        finally:
            del self._runs[call.run], self._ended[call.run]
            self._presence.tell((*call.devices, *call.others), StopRun(run=call.run))

    def start_run(self, device: str, call: RunRequest) -> None:
        """Have a process of the device join the run, if none works for it already."""
        self._presence.run_started(device, call.run)
        with self._changed:  # last: what is known to have ended is not at work
            self._ended[call.run].pop(device, None)
        self._presence.tell([device], _start_message(call, call.stages.get(device, 1)))

    def ended(self, run: str) -> Mapping[str, str]:
        with self._changed:
            return dict(self._ended.get(run, {}))

    def leaving(self) -> list[str]:
        """Who was asked to leave, by whatever process (`isthmus drain`), since this was called last."""
        return self._state.take_leaving()

    @contextlib.contextmanager
    def long_lived_run(self, call: RunRequest, acceptor: Acceptor) -> Generator[None]:
        """Start a run on those of its devices that are connected, and on the others when they connect."""
        self._receive(call.run, acceptor)
        self._long_lived_runs[call.run] = call
        for unknown_peer in sorted(self.present - set(call.devices)):
            self._log(f"{unknown_peer} waits: {_meant_for(call)}")
        try:
            self._presence.tell(call.devices, _start_message(call))
            yield
        finally:
            del self._runs[call.run], self._long_lived_runs[call.run]
            self._presence.tell(call.devices, StopRun(run=call.run))

    def ask(self, device: str, message: AnyMessage, kind: type[Answer], within_s: float) -> Answer:
        """What a device answers to a question, which `run` names. PeerError when it does not, or leaves."""
        answers: queue.SimpleQueue[AnyMessage] = queue.SimpleQueue()
        self._asked[message.run] = (device, answers)
        asked, until_s = self._presence.lane(device), time.monotonic() + within_s
        try:
            self._presence.tell([device], message)
            answer = None
            while answer is None:
                with contextlib.suppress(queue.Empty):
                    answer = answers.get(timeout=min(WATCH_S, max(0.0, until_s - time.monotonic())))
                    break
                if self._presence.lane(device) is not asked or asked is None:
                    raise PeerError(f"device {device!r}: left before it answered")
                if time.monotonic() >= until_s:
                    raise PeerError(f"device {device!r}: did not answer for {within_s:g} s")
        finally:
            del self._asked[message.run]
        if not isinstance(answer, kind):
            raise PeerError(f"device {device!r}: sent {type(answer).__name__}, expected {kind.__name__}")
        return answer

    def id_of(self, device: str) -> str:
        """Of a device that is here."""
        return next(id for id, name in self._names.items() if name == device)

    def _unknown_peer(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, PeerError, StoreError):
            name = admit(connection, self._state.authority, self._state.roster)
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
            if name is None:
                reason = f"device {party.id} is not in this fleet, or was revoked"
                channel.send(Rejected(run="", about="membership", reason=reason))
                return
            channel.other = f"device {name!r}"
            self._names[party.id] = name
            first = first_message(channel, (DevicePresent, JoinRun, RelayWait, RelayConnect), self._timeout_s)
            if isinstance(first, DevicePresent):
                self._stay(channel, first, name, party)
            elif isinstance(first, RelayWait | RelayConnect):
                self._relay.serve(channel, first, self._names)
            elif first is None or device_of(first.device) != name:
                return
            elif (run := self._acceptor(channel, first)) is not None:
                run.admit(channel, first)
        except (OSError, PeerError, StoreError) as e:
            self._log_limiter.about(name or party.id, str(e))
        finally:
            channel.close()
            with self._changed:
                self._channels[party.id].discard(channel)

    def _acceptor(self, channel: SocketChannel, join: JoinRun) -> Acceptor | None:
        """Of the run, if it is one. For one that is expected a device waits here."""
        while (found := self._runs.get(join.run)) is None and self._is_expected(join.run):
            channel.send(Heartbeat(run=join.run))
            with self._changed:
                self._changed.wait_for(lambda: join.run in self._runs, BEAT_S)
        return found

    def _is_expected(self, run: str) -> bool:
        return run == self._expected and time.monotonic() < self._expected_until_s and not self._over.is_set()

    def _receive(self, run: str, acceptor: Acceptor) -> None:
        with self._changed:
            self._runs[run] = acceptor
            self._changed.notify_all()

    def _stay(self, channel: SocketChannel, present: DevicePresent, name: str, party: Party) -> None:
        """For as long as the device stays connected."""
        different = mismatch(versions_here(), present.versions)
        if different is not None:
            channel.send(Rejected(run="", about="version", reason=different))
            raise PeerError(f"{channel.other}: refused: {different}")
        lane = SendLane(channel, timeout_s=self._timeout_s, on_error=lambda _: channel.close())
        calls = list(self._long_lived_runs.values())
        others = "" if any(name in call.devices for call in calls) else "; ".join(map(_meant_for, calls))
        lane.put(Welcome(run="", device=name, timeout_s=self._timeout_s, idle=others))
        self._presence.came(name, lane, present)
        self._state.roster.seen(party.id, time.time())
        self._log_limiter.about(name, f"{name} is here, and waits: {others}" if others else f"{name} is here")
        for call in list(self._long_lived_runs.values()):
            if name in call.devices:
                lane.put(_start_message(call))
        try:
            self._on_message(channel, lane, name, party)
        finally:
            self._presence.left(name, lane)
            self._log_limiter.about(name, f"{name} has left")

    def _on_message(self, channel: SocketChannel, lane: SendLane, name: str, party: Party) -> None:
        allowance = RateLimit(MOST_MESSAGES_PER_S, MOST_AT_ONCE)

        def check(message: AnyMessage) -> None:
            allowance.spend(time.monotonic())
            _only_fleet(message)

        while (received := channel.receive(check, idle_s=self._timeout_s)) is not None:
            message = received[0]
            if isinstance(message, Heartbeat):
                lane.put(Heartbeat(run=""))
            elif isinstance(message, Renew):
                lane.put(Renewed(run="", certificate=self._renewed(message.request, party)))
            elif isinstance(message, EndedMessage) and message.run in self._ended:
                how = message.how[:500] if self._state.roster.name_of(party.id) is not None else REVOKED
                with self._changed:
                    self._ended[message.run][name] = how
                self._presence.ended(name)
            elif isinstance(message, ANSWERS) and message.run in self._asked:
                device, answers = self._asked[message.run]
                if device == name:
                    answers.put(message)

    def _renewed(self, request: bytes, party: Party) -> bytes:
        if len(request) > MOST_REQUEST_BYTES or id_of(requested_key(request)) != party.id:
            raise PeerError(f"device {party.id}: asked for a certificate of another key")
        return self._state.authority.certify(request, "device")[1]

    def _watch(self) -> None:
        """Disconnect revoked devices at the next check. Any process may revoke them."""
        while not self._over.wait(WATCH_S):
            try:
                self._look()
            except Exception as e:  # a full disk, say: who is revoked must go all the same, once that is over
                self._log(f"checking the fleet failed: {type(e).__name__}: {e}")

    def _look(self) -> None:
        self._log_limiter.look()
        self._shut_out()
        self._state.renew()
        write_status(self._state.folder, self.current_status())

    def _shut_out(self) -> None:
        """Disconnect those that were revoked."""
        with self._shutting_out:
            self._shut_out_alone()

    def _shut_out_alone(self) -> None:
        with self._changed:
            names, connected = dict(self._names), {id: list(found) for id, found in self._channels.items()}
        for id, name in names.items():
            if self._state.roster.name_of(id) is not None:
                continue
            for ended in list(self._ended.values()):
                ended.setdefault(name, REVOKED)
            for channel in connected.get(id, []):
                channel.close()
            self._relay.cut(id)
            with self._changed:
                self._names.pop(id, None)  # another device may have the name one day

    def current_status(self) -> CoordinatorStatus:
        """Who is here, and how devices at work reach each other."""
        with self._changed:
            ids, runs = {name: id for id, name in self._names.items()}, frozenset(self._runs)
        relayed = tuple(self._relay.links())
        return CoordinatorStatus(
            at_s=time.time(),
            port=self.port,
            devices=self._presence.devices(ids, runs),
            links=self._presence.links(relayed, runs),
            relayed=relayed,
            awaited=self._presence.awaited,
        )


def _meant_for(call: RunRequest) -> str:
    few = ", ".join(call.devices[:MOST_NAMES]) + (" ..." if len(call.devices) > MOST_NAMES else "")
    return f"the run is for {few}"


def _start_message(call: RunRequest, stages: int = 1) -> StartRun:
    return StartRun(run=call.run, timeout_s=call.timeout_s, threads=call.threads, stages=stages)


class _FleetSession:
    def __init__(self, service: FleetCoordinator, presence: Presence, call: RunRequest) -> None:
        self._service = service
        self._presence = presence
        self._call = call

    def ended(self) -> Mapping[str, str]:
        return self._service.ended(self._call.run)

    def starting(self, device: str) -> bool:
        return self._presence.works_for(device, self._call.run)

    def returns(self, device: str) -> bool:
        return device in self._presence.names

    def offers(self) -> list[str]:
        return self._presence.idle((*self._call.devices, *self._call.others), self._call.run)

    def leaving(self) -> list[str]:
        return self._service.leaving()

    def linked(self, device: str, paths: Sequence[PeerPath]) -> None:
        self._presence.linked(device, self._call.run, paths)

    def bandwidth(self, source: str, target: str) -> float | None:
        """By the two devices' agents, beside the processes that work."""
        try:
            return probe_link(self._service, source, target, lambda _: None).bandwidth_bytes_per_s
        except (PeerError, UserError, StopIteration):  # one of them is not here
            return None

    def call(self, device: str) -> None:
        self._service.start_run(device, self._call)


def _only_fleet(message: AnyMessage) -> None:
    expected = Heartbeat | Renew | EndedMessage | ANSWERS
    if not isinstance(message, expected) or message.tensors:
        raise PeerError(f"sent {type(message).__name__}, which a device without a run does not send")
