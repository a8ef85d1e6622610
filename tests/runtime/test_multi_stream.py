"""Several streams as one, byte for byte."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.runtime.messages.run import StreamHello
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.multi_stream import BLOCK_BYTES, MultiStream, StreamAssembler, streams_for
from isthmus.training.layout import pack
from isthmus.wire_types import MOST_STREAMS

from .channel_cases import parcel

SIZES = st.lists(st.integers(0, BLOCK_BYTES * 2 + 1), max_size=6)


@contextlib.contextmanager
def _braids(count: int) -> Generator[tuple[MultiStream, MultiStream]]:
    pairs = [socket.socketpair() for _ in range(count)]
    ours, theirs = MultiStream([a for a, _ in pairs]), MultiStream([b for _, b in pairs])
    for stream_group in (ours, theirs):
        stream_group.settimeout(5)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def _read(stream_group: MultiStream, size: int) -> bytes:
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        got = stream_group.recv_into(view[at:])
        assert got
        at += got
    return bytes(found)


@given(st.integers(1, MOST_STREAMS), st.lists(SIZES, max_size=3))
def test_bytes_come_in_order(count: int, messages: list[list[int]]) -> None:
    data = [[bytes([17 * i + j + 1]) * size for j, size in enumerate(sizes)] for i, sizes in enumerate(messages)]
    whole = b"".join(b"".join(pieces) for pieces in data)
    with _braids(count) as (ours, theirs), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read, theirs, len(whole))
        for pieces in data:
            assert ours.sendmsg([memoryview(piece) for piece in pieces]) == sum(map(len, pieces))
        assert reading.result(20) == whole


def test_frames_cross_both_ways_and_the_end_is_seen() -> None:
    tensor = torch.randint(0, 256, (3 * BLOCK_BYTES + 5,), dtype=torch.uint8)
    with _braids(3) as ends, ThreadPoolExecutor(4) as pool:
        alice, bob = (SocketChannel(end, name, 5.0) for end, name in zip(ends, ("bob", "alice"), strict=True))
        for _ in range(3):
            sent = [pool.submit(c.send, parcel(7, tensor), [pack(tensor)]) for c in (alice, bob)]
            for received in [pool.submit(c.receive, None, 5.0) for c in (alice, bob)]:
                found = received.result(10)
                assert found is not None and torch.equal(found[1][0], tensor)
            for done in sent:
                done.result(10)
        alice.close()
        assert bob.receive(idle_s=5) is None


def test_a_block_of_a_false_length_is_refused() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall((BLOCK_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(OSError, match="expected at most"):
            MultiStream([far]).recv_into(memoryview(bytearray(8)))


def test_strands_are_put_together_by_name() -> None:
    pairs = [socket.socketpair() for _ in range(4)]
    channels = [SocketChannel(b, f"stream {n}", 5.0) for n, (_, b) in enumerate(pairs)]
    assembler = StreamAssembler(5.0)
    order = [("one", 1), ("two", 0), ("two", 1)]
    found = [
        assembler.add(channel, StreamHello(run="r", stream_group=name, number=number, of=2))
        for channel, (name, number) in zip(channels, order, strict=False)
    ]
    assert found[:2] == [None, None] and found[2] is not None
    SocketChannel(MultiStream([pairs[1][0], pairs[2][0]]), "x", 5.0).send(parcel(3))
    received = found[2].receive(idle_s=5)
    assert received is not None and received[0] == parcel(3)
    for number, of in ((1, 2), (2, 2), (-1, 2), (0, 1), (0, MOST_STREAMS + 1)):
        with pytest.raises(PeerError, match="stream"):
            assembler.add(channels[3], StreamHello(run="r", stream_group="one", number=number, of=of))
    for a, b in pairs:
        a.close()
        b.close()


def test_as_many_streams_as_the_link_has_room_for() -> None:
    assert streams_for(Link(0.0002, 1.25e9)) == 1  # 10 Gbit/s in one room
    assert streams_for(Link(0.05, 2.5e6)) == 1  # 20 Mbit/s over an ocean
    assert streams_for(Link(0.1, 1.25e8)) == 6  # 1 Gbit/s at 100 ms: 25 MB on the way
    assert streams_for(Link(0.2, 1.25e9)) == MOST_STREAMS
