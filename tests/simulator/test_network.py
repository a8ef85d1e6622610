import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.fleet import Link, LinkTrace
from isthmus.simulator import Transmission, Uplink, Wire

MBIT = 1e6 / 8
WAN = Link(latency_s=0.05, bandwidth_bytes_per_s=100 * MBIT)
MESSAGE = 20_000_000  # 1.6 s at 100 Mbit/s


def test_a_message_arrives_after_its_serialisation_and_the_latency():
    times = Wire(WAN).send(0.0, MESSAGE)
    assert times == pytest.approx((0.0, 1.6, 0.05, 1.65))


def test_a_message_waits_for_those_before_it_but_latency_is_paid_once():
    wire = Wire(WAN)
    arrivals = [wire.send(now, MESSAGE).arrived_s for now in (0.0, 0.0, 0.1)]
    assert arrivals == pytest.approx([1.65, 3.25, 4.85])


def test_an_idle_link_saves_nothing_up():
    wire = Wire(WAN)
    wire.send(0.0, MESSAGE)
    assert wire.send(10.0, MESSAGE) == pytest.approx((10.0, 11.6, 10.05, 11.65))


def test_overhead_occupies_the_link_with_each_message():
    wire = Wire(WAN, message_s=0.4)
    assert [wire.send(0.0, MESSAGE).sent_s for _ in range(2)] == pytest.approx([2.0, 4.0])


def test_jitter_never_reorders_a_link():
    factors = iter([1.0, 100.0, 1.0, 0.01])  # the first message's latency is 5 s, the second's 0.5 ms
    wire = Wire(WAN, factor=lambda: next(factors))
    assert [wire.send(0.0, MESSAGE).arrived_s for _ in range(2)] == pytest.approx([6.6, 6.6])


def test_messages_that_leave_a_site_at_once_share_its_uplink():
    uplink = Uplink(50 * MBIT)
    first, second = Wire(WAN, uplink=uplink), Wire(WAN, uplink=uplink)
    assert first.send(0.0, MESSAGE).sent_s == pytest.approx(3.2)
    assert second.send(0.0, MESSAGE).sent_s == pytest.approx(6.4)


def test_a_wide_uplink_changes_nothing():
    shared = Wire(WAN, uplink=Uplink(1000 * MBIT))
    assert [shared.send(0.0, MESSAGE) for _ in range(3)] == _alone(3)


def _alone(count: int) -> list[Transmission]:
    wire = Wire(WAN)
    return [wire.send(0.0, MESSAGE) for _ in range(count)]


def test_a_queue_before_one_link_leaves_the_uplink_to_the_others():
    uplink = Uplink(100 * MBIT)
    slow = Wire(Link(latency_s=0.0, bandwidth_bytes_per_s=1 * MBIT), uplink=uplink)
    for _ in range(3):
        slow.send(0.0, 1_000_000)  # 8 s each on its own link, 0.08 s each of the uplink
    assert Wire(WAN, uplink=uplink).send(0.0, MESSAGE).sent_s == pytest.approx(1.6 + 0.08)


@given(
    messages=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 10_000_000)), min_size=1, max_size=20),
)
def test_an_uplink_passes_no_more_than_its_bandwidth_and_never_idles(messages: list[tuple[float, int]]):
    uplink, now_s, ends = Uplink(10 * MBIT), 0.0, list[float]()
    starts = list(itertools.accumulate(wait for wait, _ in messages))
    for start_s, (_, size) in zip(starts, messages, strict=True):
        now_s = start_s
        ends.append(uplink.occupy(now_s, start_s, size))
    free_s = 0.0  # a queue, since all are ready in order
    for start_s, (_, size), end_s in zip(starts, messages, ends, strict=True):
        free_s = max(free_s, start_s) + size / (10 * MBIT)
        assert end_s == pytest.approx(free_s)


def test_a_link_follows_its_trace():
    trace = LinkTrace(times_s=(0.0, 1.0), latency_s=(0.1, 0.2), bandwidth_bytes_per_s=(1e6, 2e6))
    wire = Wire(trace.mean())
    assert wire.send(0.0, 500_000) == pytest.approx((0.0, 0.5, 0.1, 0.6))
    assert wire.send(0.0, 1_500_000) == pytest.approx((0.5, 1.5, 0.7, 1.7))
    assert wire.send(10.0, 2_000_000) == pytest.approx((10.0, 11.0, 10.2, 11.2))
