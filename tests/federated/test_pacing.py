"""Emulated executors."""

from __future__ import annotations

import math
import statistics

import pytest

from isthmus.federated.pacing import Emulation


def test_a_slow_one_takes_eta_times_longer() -> None:
    assert Emulation(eta=3.0).clock()(0.5, 0) == 2.0
    assert Emulation().clock()(0.5, 7) == 0.5


def test_an_unstable_one_follows_the_cosine_of_its_number() -> None:
    unstable = Emulation(executor=1, unstable=True, rounds=10)
    for round_ in (0, 3, 9):
        assert unstable.clock()(1.0, round_) == pytest.approx(2 + math.cos(0.314 * round_ + 1))


def test_noise_keeps_the_mean_and_takes_no_time_back() -> None:
    lasts = Emulation(eta=1.0, noise=0.3, seed=1).clock()
    drawn = [lasts(1.0, 0) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(2.0, rel=0.02)
    assert statistics.pstdev(math.log(d) for d in drawn) == pytest.approx(0.3, rel=0.05)
    lasts = Emulation(noise=1.0).clock()
    assert min(lasts(1.0, 0) for _ in range(50)) == 1.0
