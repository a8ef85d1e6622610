"""Emulated executors."""

from __future__ import annotations

import math
import statistics

import pytest

from isthmus.federated.emulated_speed import Pacer, SpeedEmulation


def test_a_slow_one_takes_eta_times_longer() -> None:
    assert SpeedEmulation(eta=3.0).clock()(0.5, 0) == 2.0
    assert SpeedEmulation().clock()(0.5, 7) == 0.5


def test_an_unstable_one_follows_the_cosine_of_its_number() -> None:
    unstable = SpeedEmulation(executor=1, unstable=True, rounds=10)
    for round_ in (0, 3, 9):
        assert unstable.clock()(1.0, round_) == pytest.approx(2 + math.cos(0.314 * round_ + 1))


def test_noise_keeps_the_mean_and_takes_no_time_back() -> None:
    lasts = SpeedEmulation(eta=1.0, noise=0.3, seed=1).clock()
    drawn = [lasts(1.0, 0) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(2.0, rel=0.02)
    assert statistics.pstdev(math.log(d) for d in drawn) == pytest.approx(0.3, rel=0.05)
    lasts = SpeedEmulation(noise=1.0).clock()
    assert min(lasts(1.0, 0) for _ in range(50)) == 1.0


class Host:
    """Its clocks; a sleeper is woken `late_s` after it should be."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.clock_s = self.core_s = 0.0
        self.late_s = late_s
        self.slept: list[float] = []

    def work(self, core_s: float, waited_s: float = 0.0) -> None:
        self.core_s += core_s
        self.clock_s += core_s + waited_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock_s += seconds + self.late_s

    def pacer(self, factor: float) -> Pacer:
        return Pacer(lambda s, _: factor * s, clock=lambda: self.clock_s, core=lambda: self.core_s, sleep=self.sleep)

    def train(self, pacer: Pacer, core_s: float, waited_s: float = 0.0) -> float:
        pacer.begin()
        self.work(core_s, waited_s)
        return pacer.end()


def test_a_wait_for_a_core_is_not_stretched() -> None:
    host = Host()
    pacer = host.pacer(4.0)
    assert host.train(pacer, 1.0, waited_s=2.0) == pytest.approx(4.0)
    assert host.slept == [pytest.approx(1.0)]


def test_what_a_late_sleeper_lost_is_taken_from_the_next_sleeps() -> None:
    host = Host(late_s=0.5)
    pacer = host.pacer(2.0)
    taken = [host.train(pacer, 1.0) for _ in range(8)]
    assert taken == pytest.approx([2.5] + [2.0] * 7)
    assert host.clock_s == pytest.approx(16.5)


def test_a_host_that_cannot_keep_up_takes_longer_and_is_forgiven_in_the_next_turn() -> None:
    host = Host()
    pacer = host.pacer(2.0)
    assert host.train(pacer, 1.0, waited_s=3.0) == 4.0
    assert host.train(pacer, 1.0) == 1.0, "two seconds behind: nothing to sleep"
    assert host.train(pacer, 1.0) == pytest.approx(1.0)
    assert host.train(pacer, 1.0) == pytest.approx(2.0)
    assert host.train(pacer, 1.0, waited_s=3.0) == 4.0
    pacer.open(1)
    assert host.train(pacer, 1.0) == 2.0


def test_an_executor_that_is_not_emulated_never_sleeps() -> None:
    host = Host()
    pacer = host.pacer(1.0)
    assert [host.train(pacer, 1.0, waited_s=w) for w in (0.0, 0.5, 0.0)] == [1.0, 1.5, 1.0]
    assert not host.slept
