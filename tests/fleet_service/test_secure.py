"""TLS between two parties, and the stream that two threads share."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from isthmus.errors import PeerError, UserError
from isthmus.runtime.identity import Authority, Identity, Party
from isthmus.runtime.messages.run import ToPeer
from isthmus.runtime.transport.channel import SocketChannel, dial
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.secure import (
    RECORD_BYTES,
    TlsConnection,
    records,
    secure_accepted,
    secure_dialled,
    secure_unknown,
)
from isthmus.training.layout import pack
from tests.runtime.channel_cases import parcel

from .parties import certified, outcomes, secured_pair, soon, tcp_pair

Ends = tuple[TlsConnection, TlsConnection]


@pytest.fixture
def ends(coordinator: Identity, device: Identity) -> Ends:
    return secured_pair(coordinator, device)


def _meet(dial: Callable[[socket.socket], object], accept: Callable[[socket.socket], object]) -> list[object]:
    ours, theirs = tcp_pair()
    return outcomes(lambda: dial(ours), lambda: accept(theirs))


def test_both_sides_know_each_other(coordinator: Identity, device: Identity) -> None:
    dialled, accepted = _meet(
        lambda s: secure_dialled(s, device, Party("coordinator", coordinator.id)),
        lambda s: secure_accepted(s, coordinator, unknown_peers=False),
    )
    assert isinstance(dialled, TlsConnection)
    assert isinstance(accepted, tuple) and accepted[1] == Party("device", device.id)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (Party("coordinator", ""), "identifies itself as device"),
        (Party("device", "0" * 32), f"expected device {'0' * 32}"),
    ],
)
def test_a_valid_certificate_of_another_is_refused(
    authority: Authority, device: Identity, tmp_path: Path, expected: Party, words: str
) -> None:
    other = certified(authority, tmp_path)
    dialled, _ = _meet(
        lambda s: secure_dialled(s, device, expected), lambda s: secure_accepted(s, other, unknown_peers=False)
    )
    assert isinstance(dialled, PeerError) and words in str(dialled)


def test_another_fleets_certificate_is_refused_on_both_sides(
    coordinator: Identity, device: Identity, tmp_path: Path
) -> None:
    foreign = certified(Authority(tmp_path / "a"), tmp_path / "d")
    for dialling, accepting in ((foreign, coordinator), (device, foreign)):
        dialled, accepted = _meet(
            lambda s, d=dialling: secure_dialled(s, d, Party("coordinator", "")),
            lambda s, a=accepting: secure_accepted(s, a, unknown_peers=True),
        )
        assert isinstance(dialled, PeerError) and isinstance(accepted, PeerError)


def test_an_expired_certificate_is_refused(authority: Authority, coordinator: Identity, tmp_path: Path) -> None:
    late = certified(authority, tmp_path, life_s=-60.0)
    _, accepted = _meet(
        lambda s: secure_dialled(s, late, Party("coordinator", "")),
        lambda s: secure_accepted(s, coordinator, unknown_peers=True),
    )
    assert isinstance(accepted, PeerError) and "expired" in str(accepted)


def test_an_unknown_peer_is_let_in_only_where_unknown_peers_are(coordinator: Identity) -> None:
    for unknown_peers in (True, False):
        _, accepted = _meet(
            lambda s: secure_unknown(s, None),
            lambda s, o=unknown_peers: secure_accepted(s, coordinator, unknown_peers=o),
        )
        if unknown_peers:
            assert isinstance(accepted, tuple) and accepted[1] is None
        else:
            assert isinstance(accepted, PeerError)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
def test_older_tls_is_refused(coordinator: Identity, version: ssl.TLSVersion) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = version
    dialled, accepted = _meet(context.wrap_socket, lambda s: secure_accepted(s, coordinator, unknown_peers=True))
    assert isinstance(dialled, ssl.SSLError) and isinstance(accepted, PeerError)


@pytest.mark.parametrize(
    "sizes", [[20], [20, 100_000], [0, 5, 0], [RECORD_BYTES] * 3, [7, RECORD_BYTES - 7, 1, 50_000]]
)
def test_records_are_the_bytes_in_order(sizes: list[int]) -> None:
    data = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    found = [bytes(r) for r in records([memoryview(d) for d in data])]
    assert b"".join(found) == b"".join(data)
    assert all(0 < len(r) <= RECORD_BYTES for r in found)
    assert sizes != [20, 100_000] or len(found[0]) == RECORD_BYTES, "a small header does not fill a record alone"


def test_two_threads_at_each_end(ends: Ends, pool: ThreadPoolExecutor) -> None:
    """Both directions at full speed at once: each is the other's interruption."""
    alice, bob = SocketChannel(ends[0], "bob", 10.0), SocketChannel(ends[1], "alice", 10.0)
    big, small = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8), torch.arange(7)
    frames = [[big, small] if number % 2 else [small] for number in range(10)]

    def send(channel: SocketChannel) -> None:
        for number, tensors in enumerate(frames):
            channel.send(parcel(number, *tensors), [pack(t) for t in tensors])

    def receive(channel: SocketChannel) -> None:
        for number, expected in enumerate(frames):
            found = channel.receive(idle_s=10)
            assert found is not None and isinstance(found[0], ToPeer) and found[0].body.item == number
            assert all(torch.equal(a, b) for a, b in zip(found[1], expected, strict=True))

    for done in [pool.submit(act, channel) for channel in (alice, bob) for act in (send, receive)]:
        done.result(20)
    alice.close()
    assert bob.receive(idle_s=5) is None
    bob.close()


def test_a_flipped_byte_is_noticed(coordinator: Identity, device: Identity) -> None:
    """Whoever passes the bytes on can neither read nor change them."""
    near, far = tcp_pair()
    start, end = tcp_pair()
    seen: list[bytes] = []
    altering = threading.Event()

    def relay(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.append(data)
            target.sendall(data[:-1] + bytes([data[-1] ^ 1]) if altering.is_set() else data)

    for pair in ((far, start), (start, far)):
        threading.Thread(target=lambda p=pair: outcomes(lambda: relay(*p)), daemon=True).start()
    dialled, accepted = outcomes(
        lambda: secure_dialled(near, device, Party("coordinator", "")),
        lambda: secure_accepted(end, coordinator, unknown_peers=False)[0],
    )
    assert isinstance(dialled, TlsConnection) and isinstance(accepted, TlsConnection)
    accepted.settimeout(5)
    buffer = memoryview(bytearray(100))
    words = b"in the open this could be read"
    dialled.sendmsg([memoryview(words)])
    assert bytes(buffer[: accepted.recv_into(buffer)]) == words
    assert not any(words in data for data in seen)
    altering.set()
    dialled.sendmsg([memoryview(words)])
    with pytest.raises(OSError, match=r"(?i)mac"):
        accepted.recv_into(buffer)


def test_closing_ends_a_receive_that_waits(ends: Ends, pool: ThreadPoolExecutor) -> None:
    channel = SocketChannel(ends[0], "bob", 60.0)
    waiting = pool.submit(channel.receive)
    threading.Timer(0.1, channel.close).start()
    assert waiting.result(20) is None
    with pytest.raises(PeerError):
        channel.send(parcel())
    ends[1].close()


def test_who_takes_nothing_is_noticed(ends: Ends) -> None:
    channel = SocketChannel(ends[0], "bob", 0.2)
    data = memoryview(bytes(50_000_000))
    with pytest.raises(PeerError, match=r"bob: accepted no data for 0\.2 s"):
        channel.send_chunk(data)
    channel.close()
    ends[1].close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_nothing_listens_in_public_without_tls(host: str) -> None:
    with pytest.raises(UserError, match=f"listening on {host} without TLS"):
        Listener(host)


def test_loopback_and_trusted_networks_may_do_without() -> None:
    Listener("127.0.0.1").close()
    Listener("localhost").close()
    Listener("0.0.0.0", trusted_network=True).close()


def test_a_listener_survives_connections_that_cannot_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener("127.0.0.1", timeout_s=5.0)
    greeted = threading.Event()
    accept, failures = socket.socket.accept, [errno.ECONNABORTED, errno.EMFILE]

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), "not now")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    listener.start(lambda _: greeted.set())
    with socket.create_connection(("127.0.0.1", listener.port), timeout=60):
        assert greeted.wait(60)
    listener.close()


def test_one_who_is_known_has_not_any_number_of_connections(
    coordinator: Identity, device: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.runtime.transport.listener.MOST_OF_ONE", 2)
    listener = Listener("127.0.0.1", identity=coordinator, timeout_s=5.0)

    def on_connection(channel: SocketChannel) -> None:
        channel.receive()

    listener.start(on_connection)

    def another() -> SocketChannel:
        return dial("127.0.0.1", listener.port, "bob", 5.0, identity=device, expected=Party("coordinator", ""))

    held = [another(), another()]
    with contextlib.suppress(PeerError):  # a connection that is closed in the handshake's last step may break it
        assert another().receive(idle_s=5.0) is None
    held.pop().close()
    soon(lambda: _stays(another()))
    held.pop().close()
    listener.close()


def _stays(channel: SocketChannel) -> bool:
    try:
        channel.receive(idle_s=0.3)
    except PeerError as e:
        return "0.3 s" in str(e)
    else:
        return False
    finally:
        channel.close()
