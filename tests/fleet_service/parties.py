"""Fleets, identities and services for tests, in temporary folders."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from isthmus.runtime.identity import Authority, Identity, Party, Role, Ticket, decode_ticket
from isthmus.runtime.service.agent import join_fleet
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute, RelayStandby
from isthmus.runtime.transport.secure import TlsConnection, secure_accepted, secure_dialled

Result = TypeVar("Result")


def certified(authority: Authority, folder: Path, role: Role = "device", life_s: float = 3600.0) -> Identity:
    """A new key in the folder, with a certificate."""
    identity = Identity.made(folder)
    identity.keep(authority.certify(identity.request(), role, life_s)[1], authority.der())
    return identity


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=60)
        theirs = listener.accept()[0]
    theirs.settimeout(5)
    return ours, theirs


def outcomes(*acts: Callable[[], Result]) -> list[Result | Exception]:
    """What each returned or raised, all run at the same time."""

    def caught(act: Callable[[], Result]) -> Result | Exception:
        try:
            return act()
        except Exception as e:
            return e

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(caught, acts))


def secured_pair(coordinator: Identity, device: Identity) -> tuple[TlsConnection, TlsConnection]:
    """The device's end and the coordinator's."""
    ours, theirs = tcp_pair()
    dialled, accepted = outcomes(
        lambda: secure_dialled(ours, device, Party("coordinator", "")),
        lambda: secure_accepted(theirs, coordinator, unknown_peers=False)[0],
    )
    assert isinstance(dialled, TlsConnection) and isinstance(accepted, TlsConnection), (dialled, accepted)
    return dialled, accepted


class Inviting(Protocol):
    def ticket(self) -> Ticket: ...


class Fleet:
    """A service in this process."""

    def __init__(
        self,
        folder: Path,
        timeout_s: float = 5.0,
        port: int = 0,
        host: str = "127.0.0.1",
        renew_after_absence_s: float = 0.0,
    ) -> None:
        self.state = FleetState(folder)
        self.said: list[str] = []
        self.service = FleetCoordinator(
            self.state,
            host,
            port,
            timeout_s=timeout_s,
            log=self.said.append,
            renew_after_absence_s=renew_after_absence_s,
        )
        self.address = (host, self.service.port)
        self.state.listens_at((self.address,))
        self.service.start()

    def ticket(self) -> Ticket:
        return decode_ticket(self.state.ticket())


RUN = "secret"


class ReachableDevice:
    """A device that joined, listens for others, and waits for them at the coordinator."""

    def __init__(
        self,
        fleet: Fleet,
        folder: Path,
        name: str,
        *,
        direct: bool = True,
        host: str = "127.0.0.1",
        timeout_s: float = 5.0,
    ) -> None:
        """`direct`: with simultaneous connects."""
        join_fleet(fleet.ticket(), {name: folder / name}, 5.0)
        self.identity = Identity(folder / name)
        self.dialer = PeerDialer(coordinator=fleet.address, identity=self.identity, timeout_s=timeout_s, direct=direct)
        self.came: queue.SimpleQueue[SocketChannel] = queue.SimpleQueue()
        self.host = host
        self.listener = Listener(host, identity=self.identity, timeout_s=timeout_s)
        self.listener.start(self.came.put)
        self.standby = RelayStandby(
            self.dialer, RUN, lambda found: self.listener.adopt(found, "relayed", self.came.put)
        )

    def route(self, *, direct: bool = False, streams: int = 1) -> PeerRoute:
        port = self.listener.port if direct else 0
        return PeerRoute(run=RUN, other="device 'far'", host=self.host, port=port, id=self.identity.id, streams=streams)

    def close(self) -> None:
        self.standby.close()
        self.listener.close()


@contextlib.contextmanager
def serving(folder: Path, timeout_s: float = 5.0, port: int = 0) -> Generator[Fleet]:
    fleet = Fleet(folder, timeout_s, port)
    try:
        yield fleet
    finally:
        fleet.service.close()
        fleet.state.close()


@contextlib.contextmanager
def in_background(act: Callable[[], object], stop: Callable[[], object]) -> Generator[None]:
    thread = threading.Thread(target=lambda: outcomes(act), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(60)
        assert not thread.is_alive()


def soon(condition: Callable[[], object], within_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)
