"""Send lanes. The times asserted here are what the emulation is for: medians, against size / bandwidth + latency."""

from __future__ import annotations

import itertools
import socket
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.fleet import Link
from isthmus.runtime.messages.every import AnyMessage
from isthmus.runtime.messages.run import Credit, Heartbeat, ParcelMessage
from isthmus.runtime.transport import lanes as lanes_module
from isthmus.runtime.transport.channel import Channel, SocketChannel, frame
from isthmus.runtime.transport.lanes import Credits, Departure, SendLane
from isthmus.training.layout import header_of, pack

from ..quiet import when_quiet

MBIT = 1e6 / 8

Pair = tuple[SocketChannel, SocketChannel]


@pytest.fixture
def connect() -> Iterator[Callable[[], Pair]]:
    """Makes connected channels of `alice` and `bob`."""
    made: list[SocketChannel] = []

    def connected() -> Pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            pair = SocketChannel(ours, "bob", 10.0), SocketChannel(listener.accept()[0], "alice", 10.0)
        made.extend(pair)
        return pair

    yield connected
    for channel in made:
        channel.close()


def parcel(number: int, tensor: Tensor) -> ParcelMessage:
    return ParcelMessage(run="r", parcel="forward", source=0, item=number, tensors=(header_of("x", tensor),))


def put(lane: SendLane, number: int, size_bytes: int) -> int:
    """Hand over a parcel; returns the bytes of its frame."""
    tensor = torch.zeros(size_bytes, dtype=torch.uint8)
    message = parcel(number, tensor)
    lane.put(message, [tensor])
    return sum(piece.nbytes for piece in frame(message, [pack(tensor)]))


def take(channel: Channel, idle_s: float = 5.0) -> tuple[float, AnyMessage]:
    """The next message, and when it had arrived whole."""
    received = channel.receive(idle_s=idle_s)
    assert received is not None
    return time.monotonic(), received[0]


def item(message: AnyMessage) -> int:
    assert isinstance(message, ParcelMessage)
    return message.item


# Emulated links


def one_way_s(connect: Callable[[], Pair], shape: Link, size_bytes: int) -> tuple[float, float]:
    """How long a message took on a link of its own, and how long it should have taken."""
    alice, bob = connect()
    lane = SendLane(alice, shape=shape)
    tensor = torch.zeros(size_bytes, dtype=torch.uint8)
    handed_s = time.monotonic()
    lane.put(parcel(0, tensor), [tensor])
    arrived_s, _ = take(bob)
    lane.close()
    wire_bytes = bob.statistics().received_bytes
    assert size_bytes < wire_bytes < size_bytes + 300
    return arrived_s - handed_s, shape.transfer_s(wire_bytes)


@when_quiet
def test_20_mb_over_100_mbit_and_50_ms_take_1650_ms(connect: Callable[[], Pair]) -> None:
    took_s = [one_way_s(connect, Link(0.05, 100 * MBIT), 20_000_000)[0] for _ in range(3)]
    assert statistics.median(took_s) == pytest.approx(1.65, rel=0.03)


@pytest.mark.parametrize("mbit", [10, 100, 1000])
@when_quiet
def test_a_small_message_can_be_2_ms_late_at_most_and_is_never_early(connect: Callable[[], Pair], mbit: int) -> None:
    alice, bob = connect()
    shape = Link(0.02, mbit * MBIT)
    lane = SendLane(alice, shape=shape)
    late_s: list[float] = []
    for number in range(15):
        handed_s = time.monotonic()
        wire_bytes = put(lane, number, 64)
        arrived_s, _ = take(bob)
        late_s.append(arrived_s - handed_s - shape.transfer_s(wire_bytes))
    assert min(late_s) > 0
    assert min(late_s) < 0.002, "the rest is for other work on the machine to say"
    lane.close()


@when_quiet
def test_messages_handed_over_together_pay_the_latency_once(connect: Callable[[], Pair]) -> None:
    gaps_s: list[float] = []
    totals_s: list[float] = []
    for _ in range(3):
        alice, bob = connect()
        lane = SendLane(alice, shape=Link(0.1, 100 * MBIT))
        handed_s = time.monotonic()
        put(lane, 0, 500_000)
        put(lane, 1, 1_000_000)
        first_s, first = take(bob)
        second_s, second = take(bob)
        assert (item(first), item(second)) == (0, 1)
        gaps_s.append(second_s - first_s)
        totals_s.append(second_s - handed_s)
        lane.close()
    assert statistics.median(gaps_s) == pytest.approx(0.080, abs=0.003)
    assert statistics.median(totals_s) == pytest.approx(0.100 + 0.120, abs=0.005)


@when_quiet
def test_an_idle_link_saves_up_nothing(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    shape = Link(0.0, 10 * MBIT)
    departures: list[Departure] = []
    lane = SendLane(alice, shape=shape, on_departure=departures.append)
    took_s: list[float] = []
    for number in range(3):
        time.sleep(0.1)
        handed_s = time.monotonic()
        put(lane, number, 50_000)
        took_s.append(take(bob)[0] - handed_s)
    lane.close()
    assert statistics.median(took_s) == pytest.approx(0.040, abs=0.003)
    for before, after in itertools.pairwise(departures):
        assert after.start_s > before.end_s + 0.05


@when_quiet
def test_each_direction_has_its_own_link(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    forth, back = SendLane(alice, shape=Link(0.01, 100 * MBIT)), SendLane(bob, shape=Link(0.06, 20 * MBIT))
    forth_s: list[float] = []
    back_s: list[float] = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            at_bob, at_alice = pool.submit(take, bob), pool.submit(take, alice)
            handed_s = time.monotonic()
            put(forth, 0, 2_000_000)
            put(back, 1, 500_000)
            forth_s.append(at_bob.result()[0] - handed_s)
            back_s.append(at_alice.result()[0] - handed_s)
    assert statistics.median(forth_s) == pytest.approx(0.170, abs=0.006)
    assert statistics.median(back_s) == pytest.approx(0.260, abs=0.006)
    forth.close()
    back.close()


@when_quiet
def test_two_lanes_of_one_process_keep_their_rates(connect: Callable[[], Pair]) -> None:
    shares: dict[str, list[float]] = {"fast": [], "slow": []}
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            fast = pool.submit(one_way_s, connect, Link(0.01, 200 * MBIT), 12_500_000)
            slow = pool.submit(one_way_s, connect, Link(0.05, 20 * MBIT), 1_250_000)
            for name, lane in (("fast", fast), ("slow", slow)):
                took_s, ideal_s = lane.result()
                shares[name].append(took_s / ideal_s)
    for name in shares:
        assert statistics.median(shares[name]) == pytest.approx(1, abs=0.03), name


def test_departures_tell_when_a_message_was_on_its_way(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    shape = Link(0.05, 100 * MBIT)
    departures: list[Departure] = []
    told_s: list[float] = []
    lane = SendLane(
        alice, shape=shape, on_departure=lambda d: (departures.append(d), told_s.append(time.monotonic()))
    )  # fmt: skip
    before_s = time.monotonic()
    sizes = [100_000, 1, 50_000]
    wire_bytes = [put(lane, number, size) for number, size in enumerate(sizes)]
    after_s = time.monotonic()
    for _ in sizes:
        take(bob)
    lane.close()
    assert [item(d.message) for d in departures] == [0, 1, 2]
    assert [d.size_bytes for d in departures] == sizes
    assert [d.wire_bytes for d in departures] == wire_bytes
    assert before_s <= departures[0].start_s <= after_s
    assert departures[1].start_s == departures[0].end_s and departures[2].start_s == departures[1].end_s
    for d, told in zip(departures, told_s, strict=True):
        assert told >= d.end_s
        assert d.end_s - d.start_s == pytest.approx(d.wire_bytes / shape.bandwidth_bytes_per_s)


def test_a_departure_without_a_shape_is_what_the_socket_took(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    departures: list[Departure] = []
    lane = SendLane(alice, on_departure=departures.append)
    before_s = time.monotonic()
    wire_bytes = put(lane, 0, 1000)
    arrived_s, _ = take(bob)
    lane.close()
    (departure,) = departures
    assert before_s <= departure.start_s <= departure.end_s
    assert departure.start_s <= arrived_s
    assert (departure.size_bytes, departure.wire_bytes) == (1000, wire_bytes)
    assert alice.statistics().sent_bytes == wire_bytes


# Handing over


@pytest.mark.parametrize("shape", [None, Link(0.01, 100 * MBIT)], ids=["plain", "shaped"])
def test_packing_happens_in_the_lane(
    connect: Callable[[], Pair], shape: Link | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing, go = threading.Event(), threading.Event()
    threads: list[str] = []

    def slow_pack(tensor: Tensor) -> memoryview:
        threads.append(threading.current_thread().name)
        packing.set()
        assert go.wait(5)
        return pack(tensor)

    monkeypatch.setattr(lanes_module, "pack", slow_pack)
    alice, bob = connect()
    lane = SendLane(alice, shape=shape)
    tensors = [torch.randn(4, 6)[:, ::2] for _ in range(3)]
    for number, tensor in enumerate(tensors):
        lane.put(parcel(number, tensor), [tensor])
    assert packing.wait(5)  # put has returned three times, and nothing is packed yet
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
    deadline_s = time.monotonic() + 1
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
    assert alice.statistics().sent_bytes == wire_bytes
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
    assert alice.statistics().sent_bytes == 0


@pytest.mark.parametrize("shape", [None, Link(0.01, 1000 * MBIT)], ids=["plain", "shaped"])
def test_a_lost_connection_is_told_once(connect: Callable[[], Pair], shape: Link | None) -> None:
    alice, bob = connect()
    told = threading.Event()
    errors: list[Exception] = []
    lane = SendLane(alice, shape=shape, on_error=lambda e: (errors.append(e), told.set()))
    bob.close()
    for number in range(5):
        put(lane, number, 10_000_000)
    assert told.wait(20)
    put(lane, 6, 10)
    lane.close()
    (error,) = errors
    assert isinstance(error, PeerError) and str(error).startswith("bob: connection lost while sending: ")


# Credits


def silent(channel: Channel) -> bool:
    """Whether nothing comes for a while."""
    try:
        channel.receive(idle_s=0.15)
    except PeerError as e:
        assert "silent" in str(e)
        return True
    return False


def test_no_more_than_the_window_is_on_the_way(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    credits = Credits(100_000)
    lane = SendLane(alice, credits=credits)
    for number in range(6):
        put(lane, number, 40_000)
    assert [item(take(bob)[1]) for _ in range(2)] == [0, 1]
    assert silent(bob)
    assert credits.used_bytes == 80_000
    credits.give(10_000)  # 70_000 + 40_000 is still too much
    assert silent(bob)
    credits.give(10_000)
    assert item(take(bob)[1]) == 2
    assert silent(bob)
    assert credits.used_bytes == 100_000
    credits.give(100_000)
    assert [item(take(bob)[1]) for _ in range(2)] == [3, 4]
    assert silent(bob)
    lane.close(flush_s=0.01)


def test_a_message_larger_than_the_window_goes_once_little_is_on_the_way(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    credits = Credits(10_000)
    lane = SendLane(alice, credits=credits)
    for number in range(3):
        put(lane, number, 1_000_000)
    assert item(take(bob)[1]) == 0
    credits.give(1_000_000 - 2_501)
    assert silent(bob)
    credits.give(1)  # a quarter may be left: the receiver keeps as much unsaid
    assert item(take(bob)[1]) == 1
    assert silent(bob)
    lane.close(flush_s=0.01)


def test_only_parcels_need_credits(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    lane = SendLane(alice, credits=Credits(0))
    lane.put(Heartbeat(run="r"))
    put(lane, 0, 10)
    assert take(bob)[1] == Heartbeat(run="r")
    assert item(take(bob)[1]) == 0
    lane.close()


def test_grants_overtake_parcels_that_wait_for_grants(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    lane = SendLane(alice, credits=Credits(1000))
    for number in range(3):
        put(lane, number, 1000)
    assert item(take(bob)[1]) == 0
    grant = Credit(run="r", size_bytes=5)
    lane.put(grant)
    assert take(bob)[1] == grant
    assert silent(bob)
    lane.close(flush_s=0.01)


@pytest.mark.parametrize("size_bytes", [300, 1000, 5000])
@pytest.mark.parametrize("shape", [None, Link(0.002, 1000 * MBIT)], ids=["plain", "shaped"])
def test_full_windows_both_ways_come_through(connect: Callable[[], Pair], shape: Link | None, size_bytes: int) -> None:
    """Both ends fill their window, and say what they took only once it is a quarter of it, as links do."""
    window_bytes, count = 2000, 100

    def run(channel: SocketChannel) -> list[int]:
        errors: list[Exception] = []
        credits = Credits(window_bytes)
        lane = SendLane(channel, shape=shape, credits=credits, patience_s=3, on_error=errors.append)
        for number in range(count):
            put(lane, number, size_bytes)
        found: list[int] = []
        owed_bytes = granted_bytes = 0
        while len(found) < count or granted_bytes < (count - 1) * size_bytes - window_bytes / 4:
            message = take(channel)[1]
            if isinstance(message, Credit):
                granted_bytes += message.size_bytes
                credits.give(message.size_bytes)
            else:
                found.append(item(message))
                owed_bytes += size_bytes
                if 4 * owed_bytes >= window_bytes:
                    lane.put(Credit(run="r", size_bytes=owed_bytes))
                    owed_bytes = 0
        lane.close()
        assert errors == []
        return found

    alice, bob = connect()
    with ThreadPoolExecutor(2) as pool:
        for end in [pool.submit(run, alice), pool.submit(run, bob)]:
            assert end.result() == list(range(count))


def test_what_has_not_begun_to_leave_can_be_withdrawn(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    lane = SendLane(alice)
    put(lane, 0, 1 << 25)  # more than the sockets hold: it leaves as it is read
    while lane._waiting:
        time.sleep(0.01)
    put(lane, 1, 1000)
    lane.put(Credit(run="r", size_bytes=1))
    put(lane, 2, 1000)
    lane.withdraw(ParcelMessage)
    put(lane, 3, 1000)
    came = [take(bob, 30.0)[1] for _ in range(3)]
    assert [m.item for m in came if isinstance(m, ParcelMessage)] == [0, 3]
    lane.close()


def test_a_receiver_that_takes_nothing_is_an_error(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    told = threading.Event()
    errors: list[Exception] = []
    credits = Credits(1000)
    lane = SendLane(
        alice, credits=credits, patience_s=1.0, on_error=lambda e: (errors.append(e), told.set())
    )  # fmt: skip
    for number in range(4):
        put(lane, number, 1000)
    time.sleep(0.2)
    lane.put(Credit(run="r", size_bytes=1))  # what we grant is no sign of life of the other side
    given_s = time.monotonic()
    credits.give(1)  # one that takes a little is alive: patience starts anew
    assert told.wait(20)
    assert time.monotonic() - given_s >= 1.0
    (error,) = errors
    assert isinstance(error, PeerError) and str(error) == "bob: took none of 999 bytes for 1 s"
    put(lane, 5, 10)
    lane.close()
    assert isinstance(take(bob)[1], ParcelMessage) and isinstance(take(bob)[1], Credit)
    assert silent(bob)


def test_a_message_that_waited_for_room_leaves_when_it_was_granted(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    credits = Credits(10_000)
    departures: list[Departure] = []
    lane = SendLane(alice, shape=Link(0.05, 10 * MBIT), credits=credits, on_departure=departures.append)
    wire_bytes = [put(lane, number, 10_000) for number in range(2)]
    take(bob)
    time.sleep(0.1)
    credits.give(10_000)
    granted_s = credits.given_s
    arrived_s, _ = take(bob)
    lane.close()
    assert departures[1].start_s == granted_s
    assert arrived_s - granted_s >= 0.05 + wire_bytes[1] / (10 * MBIT)


def test_giving_more_than_was_used_saves_up_nothing() -> None:
    credits = Credits(100)
    credits.give(1 << 40)
    assert credits.used_bytes == 0
    assert credits.take(100)
    assert not credits.take(1)


# Packing


def test_packing_is_done_beside_the_caller_and_beside_what_is_on_the_way(connect: Callable[[], Pair]) -> None:
    """A long message is leaving while the next is packed; nobody waits for a packer but its own message."""
    alice, bob = connect()
    lane = SendLane(alice, shape=Link(0.0, 1e6))
    mine, threads, packed = threading.get_ident(), list[int](), threading.Event()

    def pack_one() -> list[memoryview]:
        threads.append(threading.get_ident())
        packed.set()
        return [pack(torch.ones(3))]

    put(lane, 0, 1_000_000)  # leaves for a second
    lane.put(parcel(1, torch.ones(3)), [torch.ones(3)], pack_one)
    assert packed.wait(5)
    assert not bob.statistics().received_bytes
    assert item(take(bob)[1]) == 0
    received = bob.receive(idle_s=5)
    assert received is not None and item(received[0]) == 1 and torch.equal(received[1][0], torch.ones(3))
    assert threads and mine not in threads
    lane.close()


def test_packers_run_in_the_order_of_their_messages(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    lane, order = SendLane(alice), list[int]()

    def packer(number: int) -> Callable[[], list[memoryview]]:
        def work() -> list[memoryview]:
            order.append(number)
            return [pack(torch.full((2,), float(number)))]

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

    def fails() -> list[memoryview]:
        raise UserError("topk of 'x': got NaN or Inf")

    lane.put(parcel(0, torch.ones(2)), [torch.ones(2)], fails)
    lane.drain()
    lane.close()
    assert [str(e) for e in errors] == ["topk of 'x': got NaN or Inf"]
