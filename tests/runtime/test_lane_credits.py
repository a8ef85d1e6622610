"""Credits bound what is on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.protocol.run_messages import Arrived
from isthmus.runtime.messages.run import Credit, Heartbeat, ToPeer
from isthmus.runtime.transport.channel import Channel, SocketChannel
from isthmus.runtime.transport.lanes import Credits, QueuedSend, SendLane
from tests.quiet import when_quiet

from .lanes import MBIT, Pair, item, put, take


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
        lane = SendLane(channel, shape=shape, credits=credits, timeout_s=3, on_error=errors.append)
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
    lane.withdraw(Arrived)
    put(lane, 3, 1000)
    came = [take(bob, 30.0)[1] for _ in range(3)]
    assert [m.body.item for m in came if isinstance(m, ToPeer)] == [0, 3]
    lane.close()


@when_quiet
def test_a_receiver_that_takes_nothing_is_an_error(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    told = threading.Event()
    errors: list[Exception] = []
    credits = Credits(1000)
    lane = SendLane(alice, credits=credits, timeout_s=1.0, on_error=lambda e: (errors.append(e), told.set()))
    for number in range(4):
        put(lane, number, 1000)
    time.sleep(0.2)
    lane.put(Credit(run="r", size_bytes=1))  # what we grant is no sign of life of the other side
    given_s = time.monotonic()
    credits.give(1)  # one that takes a little is alive: timeout starts anew
    assert told.wait(60)
    assert time.monotonic() - given_s >= 1.0
    (error,) = errors
    assert isinstance(error, PeerError) and str(error) == "bob: accepted none of 999 bytes for 1 s"
    put(lane, 5, 10)
    lane.close()
    assert isinstance(take(bob)[1], ToPeer) and isinstance(take(bob)[1], Credit)
    assert silent(bob)


def test_a_message_that_waited_for_room_leaves_when_it_was_granted(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    credits = Credits(10_000)
    departures: list[QueuedSend] = []
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
