"""The contract of `Channel`. A further implementation is a further entry of `IMPLEMENTATIONS`."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.runtime import channel as channel_module
from isthmus.runtime.channel import (
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    VERSION,
    Channel,
    Received,
    SocketChannel,
    dial,
    frame,
)
from isthmus.runtime.messages import AnyMessage, Credit, Heartbeat, ParcelMessage
from isthmus.training.layout import TensorHeader, header_of, pack

LARGE_BYTES = 30_000_000


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@dataclass(frozen=True)
class Implementation:
    """How two connected ends are made, and a channel of one of them."""

    sockets: Callable[[], tuple[socket.socket, socket.socket]]
    channel: Callable[[socket.socket, str, float], Channel]

    @contextlib.contextmanager
    def pair(self, patience_s: float = 10.0) -> Iterator[tuple[Channel, Channel]]:
        """Channels of `alice` and `bob`: each names the other."""
        ours, theirs = self.sockets()
        alice, bob = self.channel(ours, "bob", patience_s), self.channel(theirs, "alice", patience_s)
        try:
            yield alice, bob
        finally:
            alice.close()
            bob.close()

    @contextlib.contextmanager
    def against_raw(self, patience_s: float = 10.0) -> Iterator[tuple[Channel, socket.socket]]:
        """A channel whose other end, `mallory`, writes and reads bytes as she likes."""
        ours, theirs = self.sockets()
        channel = self.channel(ours, "mallory", patience_s)
        try:
            yield channel, theirs
        finally:
            channel.close()
            theirs.close()


IMPLEMENTATIONS = {
    "loopback TCP": Implementation(tcp_pair, SocketChannel),
    "socket pair": Implementation(socket.socketpair, SocketChannel),
}
every = pytest.mark.parametrize("kind", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def parcel(number: int = 0, *tensors: Tensor) -> ParcelMessage:
    headers = tuple(header_of(f"t{i}", t) for i, t in enumerate(tensors))
    return ParcelMessage(run="r", parcel="forward", source=0, item=number, tensors=headers)


def wire(message: AnyMessage, tensors: Sequence[Tensor] = ()) -> bytes:
    return b"".join(frame(message, [pack(t) for t in tensors]))


def received(future: Future[Received | None]) -> Received:
    found = future.result(10)
    assert found is not None
    return found


def bits(tensor: Tensor) -> bytes:
    return bytes(pack(tensor.contiguous()))


def assert_same(got: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    for g, s in zip(got, sent, strict=True):
        assert (g.dtype, g.shape, g.stride()) == (s.dtype, s.shape, s.stride())
        assert bits(g) == bits(s)


def every_dtype() -> list[Tensor]:
    return [(torch.arange(-6, 6) * 1.5).to(getattr(torch, dtype)).view(3, 4) for dtype in DTYPE_BYTES]


FRAMES: dict[str, list[Tensor]] = {
    "no tensor": [],
    "every dtype": every_dtype(),
    "scalars": [t[1, 2] for t in every_dtype()],
    "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.bool), torch.ones(2), torch.empty(0, dtype=torch.int64)],
    "layouts": [
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 8)[1:4, ::3],
        torch.randn(1, 4).expand(5, 4),
    ],
    "many": [torch.full((i % 7,), i) for i in range(500)],
    "large": [torch.randint(0, 256, (LARGE_BYTES - 10,), dtype=torch.uint8), torch.arange(10)],
}


@every
@pytest.mark.parametrize("case", FRAMES)
def test_a_frame_arrives_as_it_was_sent(kind: Implementation, case: str, pool: ThreadPoolExecutor) -> None:
    tensors = FRAMES[case]
    with kind.pair() as (alice, bob):
        coming = pool.submit(bob.receive)
        message = parcel(7, *tensors)
        before_s = time.monotonic()
        size = alice.send(message, [pack(t) for t in tensors])
        got, arrived = received(coming)
        assert got == message
        assert_same(arrived, tensors)
        assert before_s <= bob.began_s <= time.monotonic()
        assert size == len(wire(message, tensors))
        assert alice.statistics().sent_bytes == bob.statistics().received_bytes == size
        assert alice.statistics().received_bytes == bob.statistics().sent_bytes == 0


@every
def test_tensors_are_sent_and_received_without_a_copy(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    sent = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    with kind.pair() as (alice, bob):
        tracemalloc.start()  # sees bytes and bytearrays, not the memory of tensors
        try:
            coming = pool.submit(bob.receive)
            alice.send(parcel(0, sent), [pack(sent)])
            received(coming)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 1_000_000


@every
def test_order_is_kept_both_ways_at_once(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    def send_all(end: Channel) -> None:
        for number in range(100):
            tensor = torch.full((number * 997 % 40_000,), number)
            end.send(parcel(number, tensor), [pack(tensor)])

    def receive_all(end: Channel) -> list[int]:
        found: list[int] = []
        for number in range(100):
            got = end.receive()
            assert got is not None and isinstance(got[0], ParcelMessage)
            assert bool((got[1][0] == number).all())
            found.append(got[0].item)
        return found

    with kind.pair() as (alice, bob):
        sends = [pool.submit(send_all, end) for end in (alice, bob)]
        receives = [pool.submit(receive_all, end) for end in (alice, bob)]
        for send in sends:
            send.result(10)
        assert [r.result(10) for r in receives] == [list(range(100))] * 2
        assert alice.statistics().sent_bytes == bob.statistics().received_bytes
        assert bob.statistics().sent_bytes == alice.statistics().received_bytes


# The end of a connection


def when_waiting(channel: Channel, pool: ThreadPoolExecutor, idle_s: float | None = None) -> Future[Received | None]:
    """A receive in another thread that has had time to begin."""
    coming = pool.submit(channel.receive, idle_s=idle_s)
    time.sleep(0.05)
    return coming


@every
def test_closing_ends_a_receive_that_waits_for_a_frame(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    with kind.pair(patience_s=30) as (alice, _):
        coming = when_waiting(alice, pool)
        alice.close()
        assert coming.result(5) is None
        assert alice.receive() is None
        alice.close()


@every
def test_closing_ends_a_receive_in_the_middle_of_a_frame(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    with kind.against_raw(patience_s=30) as (channel, mallory):
        mallory.sendall(wire(Heartbeat(run="r"))[:-1])
        coming = when_waiting(channel, pool)
        channel.close()
        assert coming.result(5) is None


@every
def test_closing_ends_a_send_that_nobody_reads(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    with kind.against_raw(patience_s=30) as (channel, _):
        sending = pool.submit(channel.send, parcel(0, tensor), [pack(tensor)])
        time.sleep(0.1)
        channel.close()
        with pytest.raises(PeerError, match=r"^mallory: connection lost while sending"):
            sending.result(5)


@every
def test_the_other_side_closing_between_frames_ends_the_frames(kind: Implementation) -> None:
    with kind.pair() as (alice, bob):
        alice.send(Heartbeat(run="r"))
        alice.close()
        assert bob.receive() == (Heartbeat(run="r"), [])
        assert bob.receive() is None


@every
@pytest.mark.parametrize("cut", ["in the prefix", "in the header", "in the first tensor", "in the last tensor"])
def test_the_other_side_closing_within_a_frame_is_its_fault(kind: Implementation, cut: str) -> None:
    tensors = [torch.arange(100), torch.arange(50)]
    whole = wire(parcel(0, *tensors), tensors)
    payload_at = len(whole) - 150 * 8
    at = {"in the prefix": 7, "in the header": 30, "in the first tensor": payload_at + 1}.get(cut, len(whole) - 3)
    short = (PREFIX.size if at < PREFIX.size else len(whole)) - at
    with kind.against_raw() as (channel, mallory):
        mallory.sendall(whole[:at])
        mallory.close()
        with pytest.raises(PeerError, match=f"^mallory: closed in the middle of a frame, {short} bytes short$"):
            channel.receive()
        assert channel.statistics().received_bytes == at


@every
def test_sending_to_one_who_has_gone_names_him(kind: Implementation) -> None:
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    with kind.pair() as (alice, bob):
        bob.close()
        with pytest.raises(PeerError, match=r"^bob: connection lost while sending: "):
            alice.send(parcel(0, tensor), [pack(tensor)])


# Deadlines


@every
@pytest.mark.parametrize("at", [3, 25, -10])
def test_a_frame_that_stalls_has_a_deadline(kind: Implementation, at: int) -> None:
    tensor = torch.arange(100)
    whole = wire(parcel(0, tensor), [tensor])
    short = (PREFIX.size if 0 < at < PREFIX.size else len(whole)) - len(whole[:at])
    with kind.against_raw(patience_s=0.2) as (channel, mallory):
        mallory.sendall(whole[:at])
        with pytest.raises(PeerError, match=f"^mallory: stalled for 0.2 s in .* of a frame, {short} bytes short$"):
            channel.receive()


@every
@pytest.mark.parametrize("idle_s", [0, 5, None], ids=["alone", "beside a patient wait", "beside an endless wait"])
def test_a_send_that_nobody_reads_has_a_deadline(
    kind: Implementation, idle_s: float | None, pool: ThreadPoolExecutor
) -> None:
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    with kind.against_raw(patience_s=0.2) as (channel, _):
        coming = when_waiting(channel, pool, idle_s) if idle_s != 0 else None
        before_s = time.monotonic()
        with pytest.raises(PeerError, match=r"^mallory: took nothing for 0\.2 s$"):
            channel.send(parcel(0, tensor), [pack(tensor)])
        assert time.monotonic() - before_s < 4
        channel.close()
        assert coming is None or coming.result(5) is None


@every
def test_slow_progress_is_progress(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    tensor = torch.zeros(6_000_000, dtype=torch.uint8)
    size = len(wire(parcel(0, tensor))) + tensor.numel()

    def read_slowly() -> int:
        at = 0
        while at < size:
            at += len(mallory.recv(1 << 18))
            time.sleep(0.02)
        return at

    with kind.against_raw(patience_s=0.2) as (channel, mallory):
        began_s = time.monotonic()
        reading = pool.submit(read_slowly)
        assert channel.send(parcel(0, tensor), [pack(tensor)]) == reading.result(20) == size
        assert time.monotonic() - began_s > 0.4  # else patience was not put to the test
        coming = pool.submit(channel.receive)
        for byte in wire(Heartbeat(run="slow")):
            mallory.sendall(bytes([byte]))
            time.sleep(0.01)
        assert received(coming)[0] == Heartbeat(run="slow")


@every
def test_silence_has_a_deadline_where_one_is_asked_for(kind: Implementation) -> None:
    with kind.against_raw(patience_s=10) as (channel, mallory):
        with pytest.raises(PeerError, match=r"^mallory: silent for 0\.1 s$"):
            channel.receive(idle_s=0.1)
        mallory.sendall(wire(Heartbeat(run="late")))  # what comes later is not lost
        assert channel.receive(idle_s=0.1) == (Heartbeat(run="late"), [])


@every
def test_waiting_for_a_frame_has_no_deadline_of_its_own(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    with kind.against_raw(patience_s=0.05) as (channel, mallory):
        coming = pool.submit(channel.receive)
        time.sleep(0.3)
        mallory.sendall(wire(Heartbeat(run="r")))
        assert received(coming) == (Heartbeat(run="r"), [])


# What a hostile party sends


def prefix(header_bytes: int, payload_bytes: int = 0, magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    return PREFIX.pack(magic, version, header_bytes, payload_bytes)


def raw_frame(header: object, payload_bytes: int = 0) -> bytes:
    encoded = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return prefix(len(encoded), payload_bytes) + encoded


def raw_parcel(payload_bytes: int, **tensor: object) -> bytes:
    whole = {"name": "x", "dtype": "int8", "shape": [4], "stride": [1], **tensor}
    fields = {"type": "ParcelMessage", "run": "r", "parcel": "forward", "source": 0, "item": 0, "tensors": [whole]}
    return raw_frame(fields, payload_bytes)


CREDIT = {"type": "Credit", "run": "r", "size_bytes": 1}


def nested(depth: int) -> object:
    """An assignment with an argument list so deep that no decoder follows."""
    deep = b"\x92\xa4list\x91" * depth + b"\xc0"
    op = {"name": "o", "kind": "operator", "target": "t", "args": [msgspec.Raw(deep)]}
    return {"type": "AssignMessage", "run": "r", "assignment": {"train": {"index": 0, "ops": [op]}}}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: x\r\n", "sent b'GET ', expected a frame that starts with b'ISTH'"),
    "another version": (prefix(9, version=2), "frame version 2, expected 1"),
    "header too long": (prefix(MAX_HEADER_BYTES + 1), rf"frame of {MAX_HEADER_BYTES + 1} \+ 0 bytes, expected at most"),
    "payload too long": (prefix(9, MAX_PAYLOAD_BYTES + 1), rf"frame of 9 \+ {MAX_PAYLOAD_BYTES + 1} bytes"),
    "everything too long": (b"ISTH\x01" + b"\xff" * 15, rf"frame of {2**32 - 1} \+ {2**64 - 1} bytes"),
    "no header": (prefix(0), "header is not a known message"),
    "not msgpack": (raw_frame(b"\xc1\xc1"), "header is not a known message: MessagePack"),
    "more than a header": (raw_frame(msgspec.msgpack.encode(CREDIT) + b"\x01"), "header is not a known message"),
    "not a map": (raw_frame([1, 2]), "Expected `object`, got `array`"),
    "no tag": (raw_frame({"run": "r"}), "missing required field `type`"),
    "unknown tag": (raw_frame({"type": "Bad\nnews", "run": "r"}), "Invalid value 'Bad news'"),
    "not UTF-8": (raw_frame(b"\x82\xa4type\xa9Heartbeat\xa3run\xa2\xff\xff"), "header is not a known message: 'utf-8'"),
    "missing field": (raw_frame({"type": "Credit", "run": "r"}), "missing required field `size_bytes`"),
    "unknown field": (raw_frame(CREDIT | {"extra": 1}), "unknown field `extra`"),
    "wrong type": (raw_frame(CREDIT | {"size_bytes": "many"}), "Expected `int`, got `str`"),
    "negative credit": (raw_frame(CREDIT | {"size_bytes": -1}), "Expected `int` >= 0"),
    "too deep": (raw_frame(nested(100_000)), "maximum recursion depth"),
    "field that refuses itself": (
        raw_frame({"type": "AssignMessage", "run": "r", "assignment": {"neighbours": [
            {"stage": 0, "device": "d", "host": "h", "port": 1, "shape": {"latency_s": -1, "bandwidth_bytes_per_s": 1}}
        ]}}),
        "header is not a known message: link",
    ),
    "payload without tensors": (raw_frame(CREDIT, 5), "frame payload of 5 bytes, its header announces 0"),
    "payload too short": (raw_parcel(3), "frame payload of 3 bytes, its header announces 4"),
    "payload missing": (raw_parcel(0, shape=[2**40]), f"frame payload of 0 bytes, its header announces {2**40}"),
    "unknown dtype": (raw_parcel(4, dtype="object"), "tensor 'x': unknown dtype 'object', expected one of: bfloat16"),
    "negative size": (raw_parcel(4, shape=[-4]), r"tensor 'x': shape \(-4,\) with stride \(1,\) has a negative"),
    "negative stride": (raw_parcel(4, stride=[-1]), r"stride \(-1,\) has a negative number"),
    "overflowing shape": (raw_parcel(0, shape=[2**32, 2**32], stride=[0, 0]), "beyond any memory"),
    "overflow to nothing": (raw_parcel(0, shape=[0, 2**63 - 1], stride=[1, 1], dtype="int64"), "beyond any memory"),
    "absurd stride": (raw_parcel(4, stride=[2**40]), r"stride \(1099511627776,\) spreads its elements too far"),
    "stride missing": (raw_parcel(4, stride=[]), "tensor 'x': 1 sizes and 0 strides"),
    "endless name": (raw_parcel(4, name="\n" * 10**6, stride=[2**63 - 1]), "tensor '.*': shape"),
}  # fmt: skip


@every
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_frame_is_refused_before_it_costs_memory(
    kind: Implementation, case: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_allocate(header: TensorHeader) -> None:
        raise AssertionError(f"memory for {header.nbytes} bytes")

    monkeypatch.setattr(channel_module, "receive_buffer", refuse_to_allocate)
    sent, expected = HOSTILE[case]
    with kind.against_raw() as (channel, mallory):
        writing = pool.submit(mallory.sendall, sent)
        with pytest.raises(PeerError, match=expected) as caught:
            channel.receive()
        channel.close()
        with contextlib.suppress(OSError):
            writing.result(5)
    message = str(caught.value)
    assert message.startswith("mallory: ")
    assert "\n" not in message and len(message) < 400


@every
def test_a_length_that_is_refused_is_not_allocated(kind: Implementation) -> None:
    with kind.against_raw() as (channel, mallory):
        mallory.sendall(prefix(MAX_HEADER_BYTES + 1))
        tracemalloc.start()
        try:
            with pytest.raises(PeerError):
                channel.receive()
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@every
def test_a_guard_refuses_before_memory_is_spent(kind: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    def guard(message: AnyMessage) -> None:
        if not isinstance(message, Heartbeat):
            raise PeerError(f"{type(message).__name__} is not expected")

    def refuse_to_allocate(header: TensorHeader) -> None:
        raise AssertionError(f"memory for {header.nbytes} bytes")

    monkeypatch.setattr(channel_module, "receive_buffer", refuse_to_allocate)
    with kind.against_raw() as (channel, mallory):
        mallory.sendall(wire(Heartbeat(run="r")) + raw_parcel(4))
        assert channel.receive(guard) == (Heartbeat(run="r"), [])
        with pytest.raises(PeerError, match=r"^mallory: ParcelMessage is not expected$"):
            channel.receive(guard)


@every
def test_a_payload_that_never_comes_is_the_senders_fault(kind: Implementation) -> None:
    with kind.against_raw(patience_s=0.2) as (channel, mallory):
        mallory.sendall(raw_parcel(1 << 39, shape=[1 << 39]))
        with pytest.raises(PeerError, match=f"^mallory: (stalled .* {1 << 39} bytes short|tensor 'x': no memory)"):
            channel.receive()


def drained(kind: Implementation, sent: bytes) -> list[AnyMessage]:
    """What a channel makes of these bytes until it refuses them or they end."""
    found: list[AnyMessage] = []
    with kind.against_raw() as (channel, mallory):
        writing = threading.Thread(target=lambda: (mallory.sendall(sent), mallory.shutdown(socket.SHUT_WR)))
        writing.start()
        with contextlib.suppress(PeerError):
            while (got := channel.receive()) is not None:
                found.append(got[0])
        writing.join(5)
    return found


@every
@given(sent=st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=100).map(raw_frame),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ).map(raw_frame),
))  # fmt: skip
def test_random_bytes_are_refused_in_our_own_words(kind: Implementation, sent: bytes) -> None:
    assert drained(kind, sent) == []


TENSORS = [torch.randn(3, 4).t(), torch.randn(2, 6)[:, ::2], torch.ones(1, 2).expand(2, 2), torch.empty(0)]
VALID = wire(parcel(3, *TENSORS), TENSORS)


@every
@given(changes=st.dictionaries(st.integers(0, len(VALID) - 1), st.integers(0, 255), max_size=4))
def test_a_corrupted_frame_is_refused_in_our_own_words(kind: Implementation, changes: dict[int, int]) -> None:
    sent = bytearray(VALID)
    for at, byte in changes.items():
        sent[at] = byte
    found = drained(kind, bytes(sent))
    assert len(found) <= 1
    assert found or bytes(sent) != VALID


def test_dialling_where_nobody_listens_names_the_party() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerError, match=re.escape(f"device 'a': cannot connect to 127.0.0.1:{port}: ")):
        dial("127.0.0.1", port, "device 'a'", 1.0)
    for host, port in (("a..b", 1), ("a" * 100, 1), ("127.0.0.1", 70_000)):
        with pytest.raises(PeerError, match=re.escape(f"device 'a': cannot connect to {host}:{port}: ")):
            dial(host, port, "device 'a'", 1.0)


def test_dialling_reaches_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = dial("127.0.0.1", listener.getsockname()[1], "bob", 5.0)
        theirs = SocketChannel(listener.accept()[0], "alice", 5.0)
    ours.send(Credit(run="r", size_bytes=5))
    assert theirs.receive() == (Credit(run="r", size_bytes=5), [])
    ours.close()
    theirs.close()
