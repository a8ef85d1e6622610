import pytest

from isthmus.fleet import Link
from isthmus.simulator import Wire

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
