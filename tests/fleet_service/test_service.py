"""Joining, staying and leaving a fleet."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from isthmus.errors import PeerError
from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.identity import Authority, Identity, Party, Ticket
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import DevicePresent, JoinRequest, NewDevice, Rejected, Renew, Renewed, Welcome
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.messages.versions import mismatch, versions_here
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service import enrollment
from isthmus.runtime.service.agent import Agent, Membership, join_fleet, membership_in
from isthmus.runtime.service.enrollment import Dismissal
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import SocketChannel, dial
from isthmus.runtime.transport.reconnection import Retry
from isthmus.runtime.transport.secure import TlsConnection, secure_unknown

from .parties import Fleet, certified, in_background, serving, soon


def _agent(fleet: Fleet, folder: Path, name: str = "desk", said: list[str] | None = None) -> Agent:
    membership = membership_in(folder) or join_fleet(fleet.ticket(), {name: folder}, 5.0)[name]
    return Agent(folder, membership, ProcessPlace(), timeout_s=5.0, log=(said if said is not None else []).append)


def _joined(fleet: Fleet, folder: Path, name: str = "desk") -> Identity:
    join_fleet(fleet.ticket(), {name: folder}, 5.0)
    return Identity(folder)


def _connected(fleet: Fleet, identity: Identity) -> SocketChannel:
    return dial(
        "127.0.0.1", fleet.service.port, "coordinator", 5.0, identity=identity, expected=Party("coordinator", "")
    )


def _answer(channel: SocketChannel) -> AnyMessage | None:
    """What comes, but for heartbeats; None when the connection closes."""
    while True:
        try:
            found = channel.receive(idle_s=5.0)
        except PeerError as e:
            assert "connection" in str(e), e
            return None
        if found is None or not isinstance(found[0], Heartbeat):
            return found[0] if found is not None else None


def test_a_device_joins_stays_and_leaves(fleet: Fleet, tmp_path: Path) -> None:
    agent = _agent(fleet, tmp_path / "desk")
    with in_background(agent.run, agent.stop):
        fleet.service.wait_for(["desk"])
        assert fleet.service.present == {"desk"}
    soon(lambda: not fleet.service.present)
    assert membership_in(tmp_path / "desk") == Membership(
        "desk", (("127.0.0.1", fleet.service.port),), fleet.state.authority.fingerprint.hex()
    )
    again = _agent(fleet, tmp_path / "desk")  # without a ticket
    with in_background(again.run, again.stop):
        fleet.service.wait_for(["desk"])


class _Counting(Agent):
    heartbeats = welcomes = 0

    def _follow(self, message: AnyMessage, *others: object) -> None:
        self.heartbeats += isinstance(message, Heartbeat)
        self.welcomes += isinstance(message, Welcome)
        super()._follow(message, *others)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_patient_device_beats_as_an_impatient_coordinator_needs_it(fleet: Fleet, tmp_path: Path) -> None:
    join_fleet(fleet.ticket(), {"desk": tmp_path / "desk"}, 5.0)
    membership = membership_in(tmp_path / "desk")
    assert membership is not None
    agent = _Counting(tmp_path / "desk", membership, ProcessPlace(), timeout_s=3600.0, log=lambda _: None)
    with in_background(agent.run, agent.stop):
        soon(lambda: agent.heartbeats > 2)  # answers to its own: the first is sent before the coordinator says anything
        assert agent.welcomes == 1, "it was in the fleet all the time"


def test_a_coordinator_that_comes_back_finds_its_devices(tmp_path: Path) -> None:
    said: list[str] = []
    with serving(tmp_path / "fleet") as fleet:
        port = fleet.service.port
        agent = _agent(fleet, tmp_path / "desk", said=said)
    with in_background(agent.run, agent.stop):
        soon(lambda: any("trying again" in line for line in said))
        assert any("coordinator: cannot connect to 127.0.0.1" in line for line in said)
        with serving(tmp_path / "fleet", port=port) as back:
            back.service.wait_for(["desk"])


def test_a_device_for_which_a_standing_call_is_not_meant_is_told_so(fleet: Fleet, tmp_path: Path) -> None:
    said: list[str] = []
    agent, early = _agent(fleet, tmp_path / "desk", said=said), _agent(fleet, tmp_path / "early", "early")
    call = RunRequest(run="0" * 32, devices=("north", "south"), timeout_s=5.0, threads=1, logs=tmp_path)
    acceptor = Acceptor(call.run, call.devices, on_message=lambda _: None, guard=lambda *_: None, timeout_s=5.0)
    with in_background(early.run, early.stop):
        fleet.service.wait_for(["early"])
        with fleet.service.long_lived_run(call, acceptor), in_background(agent.run, agent.stop):
            soon(lambda: any(line.endswith("and waits: the run is for north, south") for line in said))
    assert "early waits: the run is for north, south" in fleet.said
    soon(lambda: "desk is here, and waits: the run is for north, south" in fleet.said)  # written after desk is told


def test_a_certificate_is_renewed_on_the_same_connection(fleet: Fleet, tmp_path: Path) -> None:
    identity = _joined(fleet, tmp_path / "desk")
    identity.keep(fleet.state.authority.certify(identity.request(), "device", 60.0)[1], identity.authority_der())
    soon_over_s = identity.expires_s()
    agent = _agent(fleet, tmp_path / "desk")
    with in_background(agent.run, agent.stop):
        soon(lambda: identity.expires_s() > soon_over_s + 3600)


def test_only_the_own_key_is_renewed(fleet: Fleet, tmp_path: Path) -> None:
    identity, other = _joined(fleet, tmp_path / "desk"), Identity.made(tmp_path / "other")
    channel = _connected(fleet, identity)
    channel.send(DevicePresent(run="", versions=versions_here()))
    assert isinstance(_answer(channel), Welcome)
    channel.send(Renew(run="", request=identity.request()))
    assert isinstance(_answer(channel), Renewed)
    channel.send(Renew(run="", request=other.request()))
    assert _answer(channel) is None


def test_a_revoked_device_is_out_at_once_and_for_good(fleet: Fleet, tmp_path: Path) -> None:
    agent = _agent(fleet, tmp_path / "desk")
    outcome: list[Exception] = []

    def run() -> None:
        try:
            agent.run()
        except Dismissal as e:
            outcome.append(e)

    with in_background(run, agent.stop):
        fleet.service.wait_for(["desk"])
        fleet.state.roster.revoke("desk", time.time())
        soon(lambda: not fleet.service.present)
        soon(lambda: outcome)
    assert "was revoked" in str(outcome[0])
    assert isinstance(_answer(_connected(fleet, Identity(tmp_path / "desk"))), Rejected)


def test_a_refused_device_reads_why_whatever_it_was_sending(fleet: Fleet, tmp_path: Path) -> None:
    """What it sends is not read: a connection that was closed at once would be reset under it."""
    agent = _agent(fleet, tmp_path / "desk")

    def run() -> None:
        with contextlib.suppress(Dismissal):
            agent.run()

    with in_background(run, agent.stop):
        fleet.service.wait_for(["desk"])
        fleet.state.roster.revoke("desk", time.time())
        soon(lambda: not fleet.service.present)
    channel = _connected(fleet, Identity(tmp_path / "desk"))
    try:
        for _ in range(10):
            channel.send(Heartbeat(run=""))
            time.sleep(0.02)  # a reset comes with the first, and the next one fails
        assert isinstance(_answer(channel), Rejected)
    finally:
        channel.close()


def test_what_does_not_change_is_not_said_at_every_attempt(fleet: Fleet, tmp_path: Path) -> None:
    said: list[str] = []
    agent = _agent(fleet, tmp_path / "desk", said=said)
    fleet.service.close()
    connection = agent._connection  # pyright: ignore[reportPrivateUsage]
    connection._retry = Retry((0.0, 0.001), log_s=0.0)  # pyright: ignore[reportPrivateUsage]
    with in_background(agent.run, agent.stop):
        soon(lambda: connection._failed > 50)  # pyright: ignore[reportPrivateUsage]
    assert [text.partition("; ")[2] for text in said] == ["trying again in 0 s"]


def test_a_device_whose_certificate_has_ended_says_so(fleet: Fleet, tmp_path: Path) -> None:
    said: list[str] = []
    agent = _agent(fleet, tmp_path / "desk", said=said)
    identity = Identity(tmp_path / "desk")
    identity.keep(fleet.state.authority.certify(identity.request(), "device", -3600.0)[1], identity.authority_der())
    with in_background(agent.run, agent.stop):
        soon(lambda: said)
    assert "certificate ended 1.0 hours ago" in said[0] and "--ticket-file" in said[0]
    join_fleet(fleet.ticket(), {"desk": tmp_path / "desk"}, 5.0)  # with the key that it has
    again = _agent(fleet, tmp_path / "desk")
    with in_background(again.run, again.stop):
        fleet.service.wait_for(["desk"])


def _refused(fleet: Fleet, ticket: Ticket, folder: Path, name: str = "desk") -> str:
    with pytest.raises(PeerError) as refused:
        join_fleet(ticket, {name: folder}, 5.0)
    assert not Identity(folder).complete and membership_in(folder) is None
    return str(refused.value)


def test_tickets_that_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    ticket = fleet.ticket()
    join_fleet(ticket, {"first": tmp_path / "first"}, 5.0)
    assert "used already" in _refused(fleet, ticket, tmp_path / "second", "second")
    guessed = msgspec.structs.replace(ticket, secret=bytes(16))
    assert "not of this fleet" in _refused(fleet, guessed, tmp_path / "third")
    expired = msgspec.structs.replace(ticket, secret=fleet.state.roster.invite(0.0)[0])
    assert "expired" in _refused(fleet, expired, tmp_path / "fourth")
    other = msgspec.structs.replace(fleet.ticket(), fingerprint=bytes(32))
    assert "of another fleet than the ticket" in _refused(fleet, other, tmp_path / "fifth")
    assert "is taken by" in _refused(fleet, fleet.ticket(), tmp_path / "sixth", "first")
    assert "printable" in _refused(fleet, fleet.ticket(), tmp_path / "seventh", "../x")
    with pytest.raises(Dismissal) as refused:
        join_fleet(ticket, {"second": tmp_path / "second"}, 5.0)
    assert refused.value.exit_code == 2, "examples/deploy: a supervisor does not try again"


def test_the_secret_is_not_told_to_another_fleet(fleet: Fleet, tmp_path: Path) -> None:
    """It shows the right authority, which is no secret, but has no certificate by it."""
    ticket = fleet.ticket()
    with serving(tmp_path / "false") as false:
        moved = msgspec.structs.replace(ticket, addresses=(("127.0.0.1", false.service.port),))
        right = fleet.state.authority.der()
        with mock.patch.object(Authority, "der", lambda _: right):
            assert "its certificate is refused: another fleet's: " in _refused(fleet, moved, tmp_path / "desk")
        assert false.said == []
    join_fleet(ticket, {"desk": tmp_path / "desk"}, 5.0)  # it was not used


def test_other_addresses_of_a_ticket_are_tried(fleet: Fleet, tmp_path: Path) -> None:
    ticket = fleet.ticket()
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = ("127.0.0.1", free.getsockname()[1])
    several = msgspec.structs.replace(ticket, addresses=(closed, *ticket.addresses))
    assert join_fleet(several, {"desk": tmp_path / "desk"}, 5.0)["desk"].coordinators == (*ticket.addresses, closed)


def test_versions_that_cannot_work_together_are_refused_with_both_named(fleet: Fleet, tmp_path: Path) -> None:
    here = versions_here()
    old = msgspec.structs.replace(here, protocol=1)
    assert mismatch(here, here) is None
    assert mismatch(here, msgspec.structs.replace(here, torch="1.9.1")) is None
    for changed in ({"protocol": 0}, {"byteorder": "other"}):
        field, value = next(iter(changed.items()))
        told = mismatch(here, msgspec.structs.replace(here, **changed)) or ""
        assert str(value) in told and str(getattr(here, field)) in told
    ticket = fleet.ticket()
    with mock.patch.object(enrollment, "versions_here", side_effect=[old, here]):  # asked by the device, then here
        reason = _refused(fleet, ticket, tmp_path / "desk")
    assert "'1'" in reason and f"'{here.protocol}'" in reason
    identity = _joined(fleet, tmp_path / "desk")
    channel = _connected(fleet, identity)
    channel.send(DevicePresent(run="", versions=old))
    dismissed = _answer(channel)
    assert isinstance(dismissed, Rejected) and "'1'" in dismissed.reason and fleet.service.present == set()


@pytest.mark.parametrize(
    "message", [Heartbeat(run=""), JoinRun(run="guessed", device="desk", host="127.0.0.1", port=1)]
)
def test_a_device_must_say_that_it_is_here_and_knows_no_run(fleet: Fleet, tmp_path: Path, message: AnyMessage) -> None:
    channel = _connected(fleet, _joined(fleet, tmp_path / "desk"))
    channel.send(message)
    assert _answer(channel) is None and fleet.service.present == set()


def test_a_device_at_work_waits_for_its_run_at_a_coordinator_that_was_started_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    channel = _connected(fleet, _joined(fleet, tmp_path / "desk"))
    fleet.service.expects_reconnect("the run")
    channel.send(JoinRun(run="the run", device="desk", host="127.0.0.1", port=1))
    beats = [channel.receive(idle_s=5.0) for _ in range(2)]
    assert all(beat is not None and beat[0] == Heartbeat(run="the run") for beat in beats), "it is not silent meanwhile"
    heard: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
    acceptor = Acceptor("the run", {"desk"}, on_message=heard.put, guard=lambda *_: None, timeout_s=5.0)
    call = RunRequest(run="the run", devices=(), others=("desk",), timeout_s=5.0, threads=1, logs=tmp_path)
    with fleet.service.at_work(call, acceptor):
        device, message, _ = heard.get(timeout=60)
        assert device == "desk" and isinstance(message, JoinRun)
        acceptor.channel("desk").send(Heartbeat(run="the run"))
    acceptor.close()
    channel.close()


def _unknown_peer(fleet: Fleet) -> TlsConnection:
    connection = secure_unknown(socket.create_connection(("127.0.0.1", fleet.service.port), timeout=60), None)
    connection.settimeout(5)
    enrollment.receive_frame(connection)
    return connection


def _huge(connection: TlsConnection) -> None:
    connection.sendmsg([memoryview(b"\xff\xff\xff\xff")])


def _garbage(connection: TlsConnection) -> None:
    enrollment.send_frame(connection, b"\x81" * 5000)


def _deep(connection: TlsConnection) -> None:
    enrollment.send_frame(connection, b"\x91" * 8000)


def _other(connection: TlsConnection) -> None:
    enrollment.send_frame(connection, msgspec.msgpack.encode(Heartbeat(run="")))


@pytest.mark.parametrize("attack", [_huge, _garbage, _deep, _other])
def test_what_an_unknown_peer_sends_is_no_more_than_a_join_frame(
    fleet: Fleet, tmp_path: Path, attack: Callable[[TlsConnection], None]
) -> None:
    connection = _unknown_peer(fleet)
    attack(connection)
    with pytest.raises(OSError):
        enrollment.receive_frame(connection)
    assert fleet.said == []
    join_fleet(fleet.ticket(), {"desk": tmp_path / "desk"}, 5.0)  # others still get in


def test_a_signing_request_is_read_only_of_one_who_knows_a_secret(fleet: Fleet) -> None:
    connection = _unknown_peer(fleet)
    asked = JoinRequest(secret=bytes(16), devices=(NewDevice("x", b"junk"),), versions=versions_here())
    with mock.patch.object(enrollment, "requested_key") as reader:
        enrollment.send_frame(connection, msgspec.msgpack.encode(asked))
        answer = enrollment.receive_frame(connection)
    assert b"not of this fleet" in answer and not reader.called


def test_a_coordinator_is_not_taken_for_a_device(fleet: Fleet, tmp_path: Path) -> None:
    other = certified(fleet.state.authority, tmp_path / "c", "coordinator")
    assert isinstance(_answer(_connected(fleet, other)), Rejected)


def test_bytes_that_are_sent_again_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    """Whoever recorded a connection has nothing that a second one would take."""
    identity = _joined(fleet, tmp_path / "desk")
    with socket.create_server(("127.0.0.1", 0)) as tap:
        recorded: list[bytes] = []
        host, port = str(tap.getsockname()[0]), int(tap.getsockname()[1])

        def pass_on() -> None:
            near, _ = tap.accept()
            far = socket.create_connection(("127.0.0.1", fleet.service.port))

            def back() -> None:
                while data := far.recv(1 << 16):
                    near.sendall(data)

            with in_background(back, lambda: far.shutdown(socket.SHUT_RDWR)), contextlib.suppress(ConnectionError):
                while data := near.recv(1 << 16):
                    recorded.append(data)
                    far.sendall(data)

        with in_background(pass_on, lambda: None):
            channel = dial(host, port, "coordinator", 5.0, identity=identity, expected=Party("coordinator", ""))
            channel.send(DevicePresent(run="", versions=versions_here()))
            assert isinstance(_answer(channel), Welcome)
            channel.close()
    soon(lambda: not fleet.service.present)
    with socket.create_connection(("127.0.0.1", fleet.service.port), timeout=60) as again:
        again.sendall(b"".join(recorded))
        told = b""
        with pytest.raises((ConnectionError, StopIteration)):
            while True:
                data = again.recv(1 << 16)
                told += data
                if not data:
                    raise StopIteration
    assert fleet.service.present == set() and sum("is here" in line for line in fleet.said) == 1
