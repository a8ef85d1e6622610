"""Strangers who take up room: they get no more of it, and keep out nobody who can say who he is."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.errors import PeerError
from isthmus.runtime.device.coordinator_link import CoordinatorLink
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.service.agent import join_fleet
from isthmus.runtime.transport import listener as listening
from isthmus.runtime.transport.channel import SocketChannel, dial
from isthmus.runtime.transport.listener import MOST_FROM_ONE, MOST_SILENT, Listener, PendingConnections, Unauthenticated
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute
from isthmus.runtime.transport.secure import TlsConnection
from isthmus.runtime.transport.tcp import HungUp, Unreached, until_reached

from .crowds import crowd
from .parties import Fleet, ReachableDevice, tcp_pair

RUN = "secret"
Secured = tuple[TlsConnection, Party | None]


def _echo(channel: SocketChannel) -> None:
    while (received := channel.receive()) is not None:
        channel.send(received[0])


def _dialled(port: int, identity: Identity) -> SocketChannel:
    expected = Party("coordinator", "")
    return until_reached(lambda: dial("127.0.0.1", port, "bob", 10.0, identity=identity, expected=expected), 20.0)


def _answers(channel: SocketChannel) -> bool:
    channel.send(Heartbeat(run="r"))
    return channel.receive(idle_s=10.0) is not None


class Held:
    """A connection of somebody, and whether it was cut."""

    def __init__(self, address: str) -> None:
        self._theirs, ours = tcp_pair()
        self.unknown = Unauthenticated(ours, address)
        ours.close()

    @property
    def cut(self) -> bool:
        self._theirs.setblocking(False)
        try:
            return self._theirs.recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        self._theirs.close()
        self.unknown.let_go()


def test_the_oldest_of_the_same_address_gives_way_then_the_oldest_of_all() -> None:
    rooms = PendingConnections()
    held = [Held("a") for _ in range(MOST_FROM_ONE)]
    others = [Held(f"b{number}") for number in range(MOST_SILENT - MOST_FROM_ONE)]
    for one in held + others:
        rooms.enter(one.unknown)
    assert not rooms.crowded() and not any(one.cut for one in held + others)
    late = [Held("a"), Held("c")]
    rooms.enter(late[0].unknown)
    assert [one.cut for one in held[:3]] == [True, False, False] and rooms.crowded() and not rooms.crowded()
    rooms.enter(late[1].unknown)
    assert [one.cut for one in held[:3]] == [True, True, False] and rooms.crowded()
    rooms.speaks(held[2].unknown)
    rooms.leave(others[0].unknown)
    more = [Held("d"), Held("e")]
    for one in more:
        rooms.enter(one.unknown)
    assert not held[2].cut, "it has room elsewhere"
    assert not any(one.cut for one in others + late + more) and not rooms.crowded()
    for one in held + others + late + more:
        one.close()


def test_who_has_passed_is_not_cut_and_who_was_cut_does_not_pass() -> None:
    """A device that was cut once it had joined a run was lost to the run."""
    passed, cut = Held("a"), Held("b")
    assert passed.unknown.passes()
    for one in (passed, cut):
        one.unknown.cut()
    assert [passed.cut, cut.cut] == [False, True] and not cut.unknown.passes()
    for one in (passed, cut):
        one.close()


def test_unknown_peers_cut_nobody_who_is_known_and_shut_out_nobody(coordinator: Identity, device: Identity) -> None:
    listener = Listener("127.0.0.1", identity=coordinator, timeout_s=30.0)
    listener.start(_echo)
    known = _dialled(listener.port, device)
    with crowd(listener.port, idle=70, dripping=20, halfway=20) as unknown_peers:
        assert _answers(known)
        for _ in range(3):
            channel = _dialled(listener.port, device)
            assert _answers(channel)
            channel.close()
        assert unknown_peers.reopened and _answers(known)
    known.close()
    listener.close()


def _first_dial_of_a_device(fleet: Fleet, device: Identity, port: int) -> None:
    join = JoinRun(run=RUN, device="desk", host="127.0.0.1", port=1)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    CoordinatorLink(
        ("127.0.0.1", fleet.service.port), device, join, inbox, lambda: (), lambda order, peers: None, 5.0
    ).close()


def _way_to_another(fleet: Fleet, device: Identity, port: int) -> None:
    dialer = PeerDialer(coordinator=("127.0.0.1", fleet.service.port), identity=device, timeout_s=5.0)
    route = PeerRoute(run=RUN, other="device 'far'", host="127.0.0.1", port=port, id=device.id)
    dialer.dial(route)[0].close()


def _joining(fleet: Fleet, device: Identity, port: int) -> None:
    join_fleet(fleet.ticket(), {"another": fleet.state.folder / "another"}, 5.0)


@pytest.mark.parametrize("act", [_first_dial_of_a_device, _way_to_another, _joining])
def test_who_is_hung_up_on_tries_again(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Fleet, Identity, int], None]
) -> None:
    join_fleet(fleet.ticket(), {"desk": tmp_path / "desk"}, 5.0)
    device = Identity(tmp_path / "desk")
    other = Listener("127.0.0.1", identity=device, timeout_s=5.0)
    other.start(lambda channel: channel.close())
    await_hello, refusals = listening.await_hello, [PeerError("no room"), PeerError("no room")]

    def crowded(connection: socket.socket) -> None:
        if refusals:
            raise refusals.pop()
        await_hello(connection)

    monkeypatch.setattr(listening, "await_hello", crowded)
    act(fleet, device, other.port)
    assert not refusals
    other.close()


def test_who_is_cut_once_its_own_part_of_the_handshake_is_done_tries_again(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TLS 1.3 the device is done before the coordinator. Jobs over 64 devices of one address ended by this."""
    near, far = (ReachableDevice(fleet, tmp_path, name, direct=False) for name in ("near", "far"))
    secure, cut = listening.secure_accepted, [PeerError("no room"), PeerError("no room")]

    def crowded(connection: socket.socket, identity: Identity, *, unknown_peers: bool) -> Secured:
        secured = secure(connection, identity, unknown_peers=unknown_peers)
        if cut and secured[1] is not None and secured[1].id == near.identity.id:
            secured[0].shutdown(socket.SHUT_RDWR)
            raise cut.pop()
        return secured

    near.standby.close()
    monkeypatch.setattr(listening, "secure_accepted", crowded)
    channel, relayed = near.dialer.dial(far.route())
    assert relayed and not cut
    channel.close()
    near.close()
    far.close()


def test_what_does_not_pass_is_not_tried_again() -> None:
    raised = [HungUp("no room"), Unreached("refused"), HungUp("never raised")]

    def attempt() -> None:
        raise raised.pop(0)

    with pytest.raises(Unreached, match="refused"):
        until_reached(attempt, 10.0)
    with pytest.raises(HungUp, match="never"):
        until_reached(attempt, 0.0)
