"""Send lanes: what is handed over leaves in order, packed beside the caller, or is told as lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.fleet import Link
from isthmus.runtime.transport import lanes as lanes_module
from isthmus.runtime.transport.lanes import Credits, PackedMessage, Packer, SendLane
from isthmus.training.layout import header_of, pack
from isthmus.training.stored import stored_tensors

from ..quiet import when_quiet
from .lanes import MBIT, Pair, item, parcel, put, take


@pytest.mark.parametrize("shape", [None, Link(0.01, 100 * MBIT)], ids=["plain", "shaped"])
def test_packing_happens_in_the_lane(
    connect: Callable[[], Pair], shape: Link | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing, go = threading.Event(), threading.Event()
    threads: list[str] = []

    def slow_pack(tensor: Tensor) -> memoryview:
        threads.append(threading.current_thread().name)
        packing.set()
        assert go.wait(60)
        return pack(tensor)

    monkeypatch.setattr(lanes_module, "pack", slow_pack)
    alice, bob = connect()
    lane = SendLane(alice, shape=shape)
    tensors = [torch.randn(4, 6)[:, ::2] for _ in range(3)]
    for number, tensor in enumerate(tensors):
        lane.put(parcel(number, tensor), [tensor])
    assert packing.wait(60)  # put has returned three times, and nothing is packed yet
    assert len(threads) == 1
    go.set()
    for tensor in tensors:
        received = bob.receive(idle_s=5)
        assert received is not None and torch.equal(received[1][0], tensor)
    assert threads == ["send to bob"] * 3
    lane.close()


@pytest.mark.parametrize("shape", [None, Link(0.01, 100 * MBIT)], ids=["plain", "shaped"])
def test_a_lane_that_waits_keeps_no_tensor_alive(
    connect: Callable[[], Pair], shape: Link | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[object]] = []

    def watched_pack(tensor: Tensor) -> memoryview:
        packed = pack(tensor)
        alive.extend((weakref.ref(tensor), weakref.ref(packed.obj)))
        return packed

    monkeypatch.setattr(lanes_module, "pack", watched_pack)
    alice, bob = connect()
    lane = SendLane(alice, shape=shape)
    put(lane, 0, 1000)
    take(bob)
    deadline_s = time.monotonic() + 30  # that they go, not when
    while any(ref() is not None for ref in alive) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [ref() for ref in alive] == [None, None]
    lane.close()


@pytest.mark.parametrize("shape", [None, Link(0.1, 1000 * MBIT)], ids=["plain", "shaped"])
def test_closing_sends_what_was_handed_over(connect: Callable[[], Pair], shape: Link | None) -> None:
    alice, bob = connect()
    lane = SendLane(alice, shape=shape)
    wire_bytes = sum(put(lane, number, 1000) for number in range(100))
    lane.close()
    assert alice.sent_bytes == wire_bytes
    alice.close()
    assert [item(take(bob)[1]) for _ in range(100)] == list(range(100))
    assert bob.receive() is None


@when_quiet
def test_closing_gives_up_in_the_end(connect: Callable[[], Pair]) -> None:
    alice, _ = connect()
    errors: list[Exception] = []
    lane = SendLane(alice, credits=Credits(1000), on_error=errors.append)
    for number in range(3):
        put(lane, number, 1000)
    before_s = time.monotonic()
    lane.close(flush_s=0.1)
    assert 0.1 <= time.monotonic() - before_s < 2.0
    alice.close()
    time.sleep(0.05)
    assert errors == []


def test_what_closing_gave_up_is_no_error(connect: Callable[[], Pair]) -> None:
    alice, _ = connect()
    errors: list[Exception] = []
    lane = SendLane(alice, shape=Link(0.2, 1000 * MBIT), on_error=errors.append)
    put(lane, 0, 1000)
    lane.close(flush_s=0.05)
    alice.close()
    time.sleep(0.3)
    assert errors == []
    assert alice.sent_bytes == 0


@pytest.mark.parametrize("shape", [None, Link(0.01, 1000 * MBIT)], ids=["plain", "shaped"])
def test_a_lost_connection_is_told_once(connect: Callable[[], Pair], shape: Link | None) -> None:
    alice, bob = connect()
    told = threading.Event()
    errors: list[Exception] = []
    lane = SendLane(alice, shape=shape, on_error=lambda e: (errors.append(e), told.set()))
    bob.close()
    for number in range(5):
        put(lane, number, 10_000_000)
    assert told.wait(60)
    put(lane, 6, 10)
    lane.close()
    (error,) = errors
    assert isinstance(error, PeerError) and str(error).startswith("bob: connection lost while sending: ")


def test_packing_is_done_beside_the_caller_and_beside_what_is_on_the_way(connect: Callable[[], Pair]) -> None:
    """A long message is leaving while the next is packed; nobody waits for a packer but its own message."""
    alice, bob = connect()
    lane = SendLane(alice, shape=Link(0.0, 1e6))
    mine, threads, packed = threading.get_ident(), list[int](), threading.Event()

    def pack_one() -> PackedMessage:
        threads.append(threading.get_ident())
        packed.set()
        return PackedMessage(parcel(1, torch.ones(3)), [pack(torch.ones(3))])

    put(lane, 0, 1_000_000)  # leaves for a second
    lane.put(parcel(1, torch.ones(3)), [torch.ones(3)], pack_one)
    assert packed.wait(60)
    assert not bob.received_bytes
    assert item(take(bob)[1]) == 0
    received = bob.receive(idle_s=5)
    assert received is not None and item(received[0]) == 1 and torch.equal(received[1][0], torch.ones(3))
    assert threads and mine not in threads
    lane.close()


def test_packers_run_in_the_order_of_their_messages(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    lane, order = SendLane(alice), list[int]()

    def packer(number: int) -> Packer:
        def work() -> PackedMessage:
            order.append(number)
            return PackedMessage(parcel(number, torch.ones(2)), [pack(torch.full((2,), float(number)))])

        return work

    for number in range(20):
        if number % 3:
            lane.put(parcel(number, torch.ones(2)), [torch.ones(2)], packer(number))
        else:
            put(lane, number, 8)
    assert [item(take(bob)[1]) for _ in range(20)] == list(range(20))
    assert order == [n for n in range(20) if n % 3]
    lane.close()


def test_what_a_packer_raises_ends_the_lane(connect: Callable[[], Pair]) -> None:
    errors: list[Exception] = []
    alice, _ = connect()
    lane = SendLane(alice, on_error=errors.append)

    def fails() -> PackedMessage:
        raise UserError("topk of 'x': got NaN or Inf")

    lane.put(parcel(0, torch.ones(2)), [torch.ones(2)], fails)
    lane.drain()
    lane.close()
    assert [str(e) for e in errors] == ["topk of 'x': got NaN or Inf"]


@pytest.mark.parametrize("shape", [None, Link(0.01, 100 * MBIT)], ids=["plain", "shaped"])
def test_a_tensor_of_a_file_is_sent_as_one_in_memory(
    connect: Callable[[], Pair], shape: Link | None, tmp_path: Path
) -> None:
    alice, bob = connect()
    lane = SendLane(alice, shape=shape)
    before, after = torch.randn(3, 5), torch.randn(2)
    large = torch.randn(700, 600)  # several pieces
    save_file({"large": large}, tmp_path / "one.safetensors")
    stored = stored_tensors(tmp_path / "one.safetensors")["large"]
    message = msgspec.structs.replace(
        parcel(0, before), tensors=(header_of("a", before), stored.header, header_of("b", after))
    )
    lane.put(message, [before, stored, after])
    received = bob.receive(idle_s=5)
    assert received is not None
    assert all(torch.equal(got, sent) for got, sent in zip(received[1], [before, large, after], strict=True))
    lane.close()
