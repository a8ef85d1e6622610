"""The contract of `Channel`. A further implementation is a further entry of `IMPLEMENTATIONS`."""

from __future__ import annotations

import contextlib
import re
import socket
import time
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.runtime.messages.run import Credit, Heartbeat, ToPeer
from isthmus.runtime.transport.channel import (
    PREFIX,
    Channel,
    Received,
    SocketChannel,
    dial,
)
from isthmus.training.layout import pack

from ..quiet import when_quiet
from .channel_cases import Implementation, every, parcel, received, wire

LARGE_BYTES = 30_000_000


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
    "many": [torch.full((i % 7,), i) for i in range(1700)],  # with a header that is compressed
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
        assert alice.sent_bytes == bob.received_bytes == size
        assert alice.received_bytes == bob.sent_bytes == 0


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
            assert got is not None and isinstance(got[0], ToPeer)
            assert bool((got[1][0] == number).all())
            found.append(got[0].body.item)
        return found

    with kind.pair() as (alice, bob):
        sends = [pool.submit(send_all, end) for end in (alice, bob)]
        receives = [pool.submit(receive_all, end) for end in (alice, bob)]
        for send in sends:
            send.result(10)
        assert [r.result(10) for r in receives] == [list(range(100))] * 2
        assert alice.sent_bytes == bob.received_bytes
        assert bob.sent_bytes == alice.received_bytes


# The end of a connection


def when_waiting(channel: Channel, pool: ThreadPoolExecutor, idle_s: float | None = None) -> Future[Received | None]:
    """A receive in another thread that has had time to begin."""
    coming = pool.submit(channel.receive, idle_s=idle_s)
    time.sleep(0.05)
    return coming


@every
def test_closing_ends_a_receive_that_waits_for_a_frame(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    with kind.pair(timeout_s=30) as (alice, _):
        coming = when_waiting(alice, pool)
        alice.close()
        assert coming.result(20) is None
        assert alice.receive() is None
        alice.close()


@every
def test_closing_ends_a_receive_in_the_middle_of_a_frame(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    with kind.against_raw(timeout_s=30) as (channel, mallory):
        mallory.sendall(wire(Heartbeat(run="r"))[:-1])
        coming = when_waiting(channel, pool)
        channel.close()
        assert coming.result(20) is None


@every
def test_closing_ends_a_send_that_nobody_reads(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    with kind.against_raw(timeout_s=30) as (channel, _):
        sending = pool.submit(channel.send, parcel(0, tensor), [pack(tensor)])
        time.sleep(0.1)
        channel.close()
        with pytest.raises(PeerError, match=r"^mallory: connection lost while sending"):
            sending.result(20)


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
        assert channel.received_bytes == at


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
    with kind.against_raw(timeout_s=0.2) as (channel, mallory):
        mallory.sendall(whole[:at])
        with pytest.raises(PeerError, match=f"^mallory: stalled for 0.2 s in .* of a frame, {short} bytes short$"):
            channel.receive()


@every
@pytest.mark.parametrize("idle_s", [0, 5, None], ids=["alone", "beside a patient wait", "beside an endless wait"])
@when_quiet
def test_a_send_that_nobody_reads_has_a_deadline(
    kind: Implementation, idle_s: float | None, pool: ThreadPoolExecutor
) -> None:
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    with kind.against_raw(timeout_s=0.2) as (channel, _):
        coming = when_waiting(channel, pool, idle_s) if idle_s != 0 else None
        before_s = time.monotonic()
        with pytest.raises(PeerError, match=r"^mallory: accepted no data for 0\.2 s$"):
            channel.send(parcel(0, tensor), [pack(tensor)])
        assert time.monotonic() - before_s < 4
        channel.close()
        assert coming is None or coming.result(20) is None


@every
@when_quiet
def test_slow_progress_is_progress(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    tensor = torch.zeros(6_000_000, dtype=torch.uint8)
    size = len(wire(parcel(0, tensor))) + tensor.numel()

    def read_slowly() -> int:
        at = 0
        while at < size:
            at += len(mallory.recv(1 << 18))
            time.sleep(0.02)
        return at

    with kind.against_raw(timeout_s=0.2) as (channel, mallory):
        began_s = time.monotonic()
        reading = pool.submit(read_slowly)
        assert channel.send(parcel(0, tensor), [pack(tensor)]) == reading.result(20) == size
        assert time.monotonic() - began_s > 0.4  # else timeout was not put to the test
        coming = pool.submit(channel.receive)
        for byte in wire(Heartbeat(run="slow")):
            mallory.sendall(bytes([byte]))
            time.sleep(0.01)
        assert received(coming)[0] == Heartbeat(run="slow")


@every
def test_silence_has_a_deadline_where_one_is_asked_for(kind: Implementation) -> None:
    with kind.against_raw(timeout_s=10) as (channel, mallory):
        with pytest.raises(PeerError, match=r"^mallory: silent for 0\.1 s$"):
            channel.receive(idle_s=0.1)
        mallory.sendall(wire(Heartbeat(run="late")))  # what comes later is not lost
        assert channel.receive(idle_s=0.1) == (Heartbeat(run="late"), [])


@every
def test_waiting_for_a_frame_has_no_deadline_of_its_own(kind: Implementation, pool: ThreadPoolExecutor) -> None:
    with kind.against_raw(timeout_s=0.05) as (channel, mallory):
        coming = pool.submit(channel.receive)
        time.sleep(0.3)
        mallory.sendall(wire(Heartbeat(run="r")))
        assert received(coming) == (Heartbeat(run="r"), [])


def test_dialling_where_nobody_listens_names_the_party() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerError, match=re.escape(f"device 'a': cannot connect to 127.0.0.1:{port}: ")):
        dial("127.0.0.1", port, "device 'a'", 1.0)
    for host, port in (("a..b", 1), ("a" * 100, 1), ("127.0.0.1", 70_000)):
        with pytest.raises(PeerError, match=re.escape(f"device 'a': cannot connect to {host}:{port}: ")):
            dial(host, port, "device 'a'", 1.0)
    with pytest.raises(PeerError, match=re.escape(f"device 'a': cannot connect to [::1]:{port}: ")):
        dial("::1", port, "device 'a'", 1.0)


def test_dialling_reaches_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = dial("127.0.0.1", listener.getsockname()[1], "bob", 5.0)
        theirs = SocketChannel(listener.accept()[0], "alice", 5.0)
    ours.send(Credit(run="r", size_bytes=5))
    assert theirs.receive() == (Credit(run="r", size_bytes=5), [])
    ours.close()
    theirs.close()


def test_no_connection_makes_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that did so at once have crashed the process: what msgspec knows of a struct is shared while it is made."""
    monkeypatch.setattr(msgspec.msgpack, "Decoder", None)
    here, there = socket.socketpair()
    with contextlib.closing(SocketChannel(here, "b")) as sender, contextlib.closing(SocketChannel(there, "a")) as other:
        sender.send(Heartbeat(run="r"))
        assert other.receive(idle_s=5.0) == (Heartbeat(run="r"), [])
