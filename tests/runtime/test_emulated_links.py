"""Lanes over emulated links. The times asserted here are what the emulation is for: medians, against size / bandwidth +
latency."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isthmus.fleet import Link
from isthmus.runtime.transport.lanes import QueuedSend, SendLane

from ..quiet import when_quiet
from .lanes import MBIT, Pair, item, parcel, put, take


def one_way_s(connect: Callable[[], Pair], shape: Link, size_bytes: int) -> tuple[float, float]:
    """How long a message took on a link of its own, and how long it should have taken."""
    alice, bob = connect()
    lane = SendLane(alice, shape=shape)
    tensor = torch.zeros(size_bytes, dtype=torch.uint8)
    handed_s = time.monotonic()
    lane.put(parcel(0, tensor), [tensor])
    arrived_s, _ = take(bob)
    lane.close()
    wire_bytes = bob.received_bytes
    assert size_bytes < wire_bytes < size_bytes + 300
    return arrived_s - handed_s, shape.transfer_s(wire_bytes)


@when_quiet
@pytest.mark.long
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
    departures: list[QueuedSend] = []
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
    departures: list[QueuedSend] = []
    sent_s: list[float] = []
    lane = SendLane(alice, shape=shape, on_departure=lambda d: (departures.append(d), sent_s.append(time.monotonic())))
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
    for d, told in zip(departures, sent_s, strict=True):
        assert told >= d.end_s
        assert d.end_s - d.start_s == pytest.approx(d.wire_bytes / shape.bandwidth_bytes_per_s)


def test_a_departure_without_a_shape_is_what_the_socket_took(connect: Callable[[], Pair]) -> None:
    alice, bob = connect()
    departures: list[QueuedSend] = []
    lane = SendLane(alice, on_departure=departures.append)
    before_s = time.monotonic()
    wire_bytes = put(lane, 0, 1000)
    arrived_s, _ = take(bob)
    lane.close()
    (departure,) = departures
    assert before_s <= departure.start_s <= departure.end_s
    assert departure.start_s <= arrived_s
    assert (departure.size_bytes, departure.wire_bytes) == (1000, wire_bytes)
    assert alice.sent_bytes == wire_bytes
