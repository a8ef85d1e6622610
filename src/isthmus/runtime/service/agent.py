"""A device that stays joined: keeps its connection to the coordinator, renews its certificate, and starts a process
for each run that it is called to."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from isthmus.errors import InternalError, IsthmusError, PeerError, UserError
from isthmus.run_files import read_json
from isthmus.runtime.identity import Identity, Ticket
from isthmus.runtime.identity.files import private_folder, write_private
from isthmus.runtime.identity.keys import REJOIN
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import (
    MOST_HARDWARE,
    CompareData,
    DataDescribed,
    DescribeData,
    DevicePresent,
    ProcessEnded,
    Rejected,
    Renew,
    Renewed,
    StartRun,
    StopRun,
    Welcome,
)
from isthmus.runtime.messages.probe import ExpectDial, MeasureLink, MeasureSpeed
from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.messages.versions import versions_here
from isthmus.runtime.processes.device_processes import DeviceProcesses, ProcessPlace
from isthmus.runtime.service.data_queries import DataAnswers
from isthmus.runtime.service.enrollment import Dismissal, join, renew_late
from isthmus.runtime.service.fleet_probe import compute_speed, expect_probe, measure_link
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.reconnection import CoordinatorConnection, OpenConnection, Outage, Retry, dial_lane
from isthmus.runtime.transport.rendezvous import PeerDialer
from isthmus.sanitize import MOST_SHOWN, sanitize
from isthmus.training.engine_operators import engine_operators


class GroupMember(Protocol):
    """An `Agent`."""

    def run(self) -> None: ...
    def stop(self) -> None: ...


def run_group(members: Mapping[str, GroupMember], log: Callable[[str], None]) -> None:
    """Until all have ended; whatever ends this thread ends them. Raises what the last of them ended with, if all ended
    by errors."""
    failed: dict[str, IsthmusError] = {}

    def live(name: str, member: GroupMember) -> None:
        try:
            member.run()
        except Exception as e:  # of any kind: nobody would hear of it
            failed[name] = e if isinstance(e, IsthmusError) else InternalError(f"{type(e).__name__}: {e}")
            if len(failed) < len(members):
                log(f"{name}: {failed[name]}; the other devices go on")

    threads = [
        threading.Thread(target=live, args=pair, name=f"device {pair[0]}", daemon=True) for pair in members.items()
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        for member in members.values():
            member.stop()
        for thread in threads:
            thread.join()
    if len(failed) == len(members):
        raise list(failed.values())[-1]


RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # waits between attempts to reach the coordinator, which may be away for days
TICK_S = 0.5
JOINED = "joined.claim"  # `isthmus join` holds this file of its state folder
_MEMBERSHIP = "membership.json"


class Membership(msgspec.Struct, frozen=True):
    """The fleet of a device, kept beside its key."""

    name: str
    coordinators: tuple[tuple[str, int], ...]  # addresses, to be tried in this order
    fleet: str = ""  # the SHA-256 of its authority's certificate, in hexadecimal; empty for one that was kept without


def join_fleet(ticket: Ticket, folders: Mapping[str, Path], timeout_s: float) -> dict[str, Membership]:
    """Redeem a ticket for the devices of a machine, by name: afterwards the folder of each holds key, certificate and
    membership. PeerError, UserError."""
    answered = join(ticket, {name: Identity.made(folder) for name, folder in folders.items()}, timeout_s)
    others = tuple(a for a in ticket.addresses if a != answered)
    found = {name: Membership(name, (answered, *others), ticket.fingerprint.hex()) for name in folders}
    for name, membership in found.items():
        write_private(folders[name] / _MEMBERSHIP, msgspec.json.encode(membership))
    return found


def membership_in(folder: Path) -> Membership | None:
    """None where nobody has joined yet. UserError for a file of the folder that is damaged, or another fleet's."""
    path = folder / _MEMBERSHIP
    found = read_json(path, Membership, f": {REJOIN}")
    if found is None:
        return None
    if not found.coordinators:
        raise UserError(f"{path}: coordinators: got none, expected an address: {REJOIN}")
    identity = Identity(folder)
    identity.check()
    if found.fleet not in ("", hashlib.sha256(identity.authority_der()).hexdigest()):
        raise UserError(f"{path}: is of another fleet than {identity.authority_path}: {REJOIN}")
    return found


class RunStarter(Protocol):
    """Works for runs in this process, in place of a process for each of them."""

    def start_run(self, call: StartRun, coordinator: tuple[str, int]) -> None: ...
    def stop_run(self, run: str) -> None: ...
    def end(self) -> None: ...


class Agent:
    """One device, for as long as `run` runs. `log` gets one line for whatever a person may want to know."""

    def __init__(
        self,
        folder: Path,
        membership: Membership,
        place: ProcessPlace,
        *,
        timeout_s: float,
        log: Callable[[str], None],
        run_starter: RunStarter | None = None,
        waits_s: Sequence[float] = RETRY_S,
    ) -> None:
        """`place` says where this device listens for others; without a host, at the address that leads to the
        coordinator. Its identity is set here."""
        self._folder = folder
        self._identity = Identity(folder)
        self._membership = membership
        self._place = place
        self._data = DataAnswers(log)
        self._timeout_s = timeout_s
        self._log = log
        self._run_starter = run_starter
        self._work: tuple[str, DeviceProcesses] | None = None
        self._close_door: Callable[[], None] = lambda: None
        """Stops waiting for the device that was to measure the link to this one last."""
        self._lock = threading.Lock()
        self._address = membership.coordinators[0]  # the coordinator's, that was dialled last
        self._connection = CoordinatorConnection(
            self._dialled,
            self._presence,
            run="",
            timeout_s=timeout_s,
            retry=Retry(waits_s, log_s=0.0),
            on_lost=self._lost,
        )

    def run(self) -> None:
        """Until `stop`. Raises Dismissal; whatever else goes wrong with the connection is tried again."""
        try:
            self._connection.serve(self._take_part)
        finally:
            self._end_work(halted=False)
            if self._run_starter is not None:
                self._run_starter.end()

    def stop(self) -> None:
        self._connection.over.set()

    def _lost(self, outage: Outage) -> bool:
        """Return whether the certificate had ended, and is renewed. Raises a Dismissal."""
        if isinstance(outage.error, Dismissal):
            raise outage.error
        if (hint := self._renewed_late()) is None:
            return True
        if outage.log:
            self._log(f"{outage.error}{hint}; trying again in {outage.wait_s:g} s")
        return False

    def _renewed_late(self) -> str | None:
        """None where the certificate had ended, and is renewed. Else a hint that it has ended, if it has: the
        coordinator gives no reason, it closes connections without a valid certificate."""
        over_s = time.time() - self._identity.expires_s()
        if over_s <= 0:
            return ""
        refused = ""
        try:
            renew_late(self._identity, self._membership.coordinators, self._timeout_s)
            if self._identity.expires_s() > time.time():
                self._log("the certificate had ended, and is renewed")
                return None
        except Dismissal as e:
            refused = f"; {e}"
        except PeerError:  # as the connection before
            pass
        return (
            f" (by this machine's clock the device's certificate ended {over_s / 3600:.1f} hours ago{refused}: set the "
            "clock, or join again with a new ticket in --ticket-file)"
        )

    @property
    def _working(self) -> str:
        """The run that a process of this device works for."""
        with self._lock:
            work = self._work
        return work[0] if work is not None and work[1].running(self._membership.name) else ""

    def _presence(self) -> DevicePresent:
        return DevicePresent(
            run="",
            versions=versions_here(),
            computes=engine_operators(self._place.engine) if self._run_starter is None else None,
            hardware=self._place.hardware[:MOST_HARDWARE],
            working=self._working,
        )

    def _take_part(self, connection: OpenConnection[SendLane]) -> None:
        """One connection, until it ends."""
        threading.Thread(target=self._watch, args=(connection,), name="watch", daemon=True).start()
        connection.receive(lambda message, _: self._follow(message, connection), _only_coordinator)

    def _dialled(self) -> tuple[SocketChannel, SendLane]:
        """PeerError when none of the coordinator's addresses answers."""
        failures: list[str] = []
        for address in self._membership.coordinators:
            self._address = address
            try:
                return dial_lane(address, "coordinator", self._timeout_s, self._identity)
            except PeerError as e:
                failures.append(str(e))
        raise PeerError("; ".join(failures))

    def _watch(self, connection: OpenConnection[SendLane]) -> None:
        """Renew the certificate, and report a process that ended."""
        lane = connection.sender
        looked_s = float("-inf")
        reported: tuple[DeviceProcesses | None, dict[str, str]] = (None, {})
        while not connection.ended.wait(TICK_S):
            now_s = time.monotonic()
            if self._connection.over.is_set():
                connection.close()
            if now_s - looked_s >= self._timeout_s:
                looked_s = now_s
                if self._identity.is_due(time.time()):
                    lane.put(Renew(run="", request=self._identity.request()))
            with self._lock:
                work = self._work
                how = work[1].ended() if work is not None else {}
            if work is not None and (work[1], how) != reported:  # a process may end as the one before it did
                reported = (work[1], how)
                if how:
                    lane.put(ProcessEnded(run=work[0], how=how[self._membership.name]))

    def _follow(self, message: AnyMessage, connection: OpenConnection[SendLane]) -> None:
        lane, coordinator = connection.sender, self._address
        match message:
            case Welcome(device=device, timeout_s=timeout_s, idle=idle):
                if timeout_s < self._timeout_s:
                    connection.start_heartbeats(timeout_s)
                waits = f", and waits: {sanitize(idle)[:MOST_SHOWN]}" if idle else ""
                self._log(f"in the fleet as {device} ({self._identity.id}){waits}")
            case Rejected(reason=reason):
                raise Dismissal(f"coordinator: {sanitize(reason)[:MOST_SHOWN]}")
            case Renewed(certificate=certificate):
                self._identity.keep(certificate, self._identity.authority_der())
            case StartRun() if self._run_starter is not None:
                self._run_starter.start_run(message, coordinator)
            case StopRun(run=run) if self._run_starter is not None:
                self._run_starter.stop_run(run)
            case StartRun(run=run):
                if self._working == run:
                    return  # for a coordinator that was started again, or has not seen it come back
                self._end_work()
                self._close_door()
                self._begin_work(message, coordinator)
            case StopRun(run=run):
                if self._work is not None and self._work[0] == run:
                    self._end_work()
                    self._log("the run is over")
            case ExpectDial():
                self._close_door()  # its port may be the same
                there, self._close_door = expect_probe(message, self._dialer(coordinator), self._placed(coordinator))
                lane.put(there)
            case MeasureLink():
                self._beside(lambda: lane.put(measure_link(message, self._dialer(coordinator))))
            case MeasureSpeed():
                # A site computes its own model alone.
                asked = message if self._run_starter is None else msgspec.structs.replace(message, trial=None)
                self._beside(lambda: lane.put(compute_speed(asked, self._place)))
            case DescribeData() if self._run_starter is None:
                self._beside(lambda: lane.put(self._data.describe(message, self._placed(coordinator))))
            case CompareData() if self._run_starter is None:
                lane.put(self._data.compare(message, self._identity.data_key()))
            case DescribeData() | CompareData():
                lane.put(DataDescribed(run=message.run, failure="a site of federated jobs, which describes no data"))
            case _:
                pass

    def _dialer(self, coordinator: tuple[str, int]) -> PeerDialer:
        return PeerDialer(
            coordinator=coordinator,
            identity=self._identity,
            timeout_s=self._timeout_s,
            direct=not self._place.relayed,
        )

    def _beside(self, act: Callable[[], None]) -> None:
        """Not in the thread that listens to the coordinator."""
        threading.Thread(target=act, name="probe", daemon=True).start()

    def _placed(self, coordinator: tuple[str, int]) -> ProcessPlace:
        return msgspec.structs.replace(
            self._place,
            host=self._place.host or local_address(*coordinator),
            identity=self._folder.absolute(),
            data=self._place.data or private_folder(self._folder / "no-data"),
        )

    def _begin_work(self, call: StartRun, coordinator: tuple[str, int]) -> None:
        place = self._placed(coordinator)
        host, port = coordinator
        launcher = DeviceProcesses(
            f"{host}:{port}", call.run, timeout_s=call.timeout_s, threads=call.threads, logs=self._folder / "logs"
        )
        launcher.start(self._membership.name, place, call.stages, role=call.role)
        with self._lock:
            self._work = (call.run, launcher)
        self._log(f"at work; log {self._folder / 'logs'}")

    def _end_work(self, *, halted: bool = True) -> None:
        """With `halted`, the processes first get the time to end by themselves."""
        with self._lock:
            work, self._work = self._work, None
        if work is not None:
            work[1].end(halted=halted)


def local_address(host: str, port: int) -> str:
    """The address of this machine on the way to another; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _only_coordinator(message: AnyMessage) -> None:
    membership = Heartbeat | Welcome | Rejected | Renewed | StartRun | StopRun
    questions = ExpectDial | MeasureLink | MeasureSpeed | DescribeData | CompareData
    if not isinstance(message, membership | questions) or message.tensors:
        raise PeerError(f"sent {type(message).__name__}, which a device without a run does not accept")
