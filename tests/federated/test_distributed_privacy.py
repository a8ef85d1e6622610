"""Noise of sites: the sampler is exact, what leaves is noised, and epsilon is the accountant's."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.federated.admission import Privacy
from isthmus.federated.secure import site_noise as sampler
from isthmus.federated.secure.site_noise import (
    RandomWords,
    SiteNoise,
    check_site_noise,
    coins,
    concentrated,
    discrete_gaussian,
    distributed_guarantee,
    site_deviation,
)
from tests.lazy import Lazy

stats = Lazy("scipy.stats")

KEY = bytes(range(32))


@pytest.mark.parametrize("variance", [0.3, 1.0, 2.25, 30.0])
def test_numbers_come_as_often_as_the_exact_distribution_says(variance: float) -> None:
    drawn = discrete_gaussian(variance, 60_000, RandomWords(KEY))
    reach = math.ceil(4 * math.sqrt(variance)) + 1
    values = np.arange(-reach, reach + 1)
    chances = np.exp(-(values**2) / (2 * variance))
    chances /= np.exp(-(np.arange(-200, 201) ** 2) / (2 * variance)).sum()
    often = chances * len(drawn) >= 5
    counts = np.array([(drawn == value).sum() for value in values[often]])
    rest = len(drawn) - counts.sum(), len(drawn) * (1 - chances[often].sum())
    observed, expected = [*counts, rest[0]], [*(chances[often] * len(drawn)), rest[1]]
    assert stats.chisquare(observed, expected).pvalue > 1e-3  # of one seed: passes always, or never


def test_large_deviations_are_gaussian() -> None:
    drawn = discrete_gaussian(2.0**72, 40_000, RandomWords(KEY)) / 2.0**36
    assert stats.kstest(drawn, "norm").pvalue > 1e-3


def test_a_coin_falls_as_the_exact_probability_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin of a half nearly every toss is decided by exact digits."""
    gammas = np.linspace(0.01, 3, 4000)
    exact = [Fraction(float(gamma)) for gamma in gammas]
    quick = coins(RandomWords(KEY), gammas, exact.__getitem__)
    monkeypatch.setattr(sampler, "MARGIN", 0.5)
    asked: list[int] = []
    slow = coins(RandomWords(KEY), gammas, lambda at: (asked.append(at), exact[at])[1])
    assert len(asked) > 1000
    assert np.array_equal(quick, slow)  # the first 64 bits decide both, as they nearly always do


@given(st.integers(0, 2**64 - 1), st.fractions(0, 40))
def test_exact_digits_agree_with_the_logarithm(bits: int, gamma: Fraction) -> None:
    below = sampler._falls(bits, gamma, RandomWords(KEY))
    if abs(chance := math.exp(-gamma) * 2.0**64 - bits) > 2.0**14:
        assert below == (chance > 0)


def test_the_same_key_draws_the_same_and_none_draws_anew() -> None:
    first, second = (discrete_gaussian(9.0, 50, RandomWords(KEY)) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(discrete_gaussian(9.0, 50, RandomWords()), first)


def test_the_noise_of_the_fewest_sites_has_the_deviation_that_epsilon_counts_on() -> None:
    privacy, unit = Privacy(clip=2.0, noise_multiplier=1.5, noise="sites"), 2.0**30
    total = np.zeros(30_000, dtype=np.int64)
    for site in range(4):
        sums = {"delta": torch.zeros(30_000, dtype=torch.int64)}
        SiteNoise(privacy, 4, RandomWords(bytes([site]) * 32)).cover(sums, unit)
        total += sums["delta"].numpy()
    assert stats.kstest(total / unit / 3.0, "norm").pvalue > 1e-3


# Epsilon


def test_epsilon_is_the_accountants_for_the_same_noise_in_one_place() -> None:
    """Of the sum of the sites' shares and of one continuous Gaussian of their variance: equal to 1e-5, for rounding to
    units of 2^-32 costs nearly nothing."""
    dp = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    privacy = Privacy(clip=1.0, noise_multiplier=1.1, noise="sites")
    rho = concentrated(privacy, 8, 10, 100_000)
    found = distributed_guarantee(privacy, 20, 1, rho).epsilon
    accountant = rdp.RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(1.1), 20)
    assert found == pytest.approx(accountant.get_epsilon(privacy.delta), rel=1e-5)
    assert found >= accountant.get_epsilon(privacy.delta)
    # Concentrated privacy composes to a little more than the privacy loss distributions of the central noise.
    central = dp.get_epsilon_gaussian(1.1 / math.sqrt(20), privacy.delta)
    assert central < found < 1.1 * central


def test_coarse_units_cost_privacy() -> None:
    """At a unit of the clip's size the rounding and the distance to a Gaussian count."""
    privacy = Privacy(clip=2.0**-34, noise_multiplier=0.5, noise="sites")
    assert concentrated(privacy, 8, 1, 1) > 1.2 * concentrated(Privacy(clip=1.0, noise_multiplier=0.5), 8, 1, 1)


@given(st.integers(2, 50), st.integers(0, 20))
def test_more_sites_than_the_fewest_add_more_noise(minimum: int, more: int) -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, noise="sites")
    total = math.sqrt(minimum + more) * site_deviation(privacy, minimum)
    assert total == pytest.approx(math.sqrt((minimum + more) / minimum))


def test_noise_of_sites_is_refused_where_single_updates_are_seen() -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, noise="sites")
    with pytest.raises(UserError, match=r"privacy.noise: got 'sites' without federated.aggregation.secure"):
        check_site_noise(privacy, 2, secure=False)
    with pytest.raises(UserError, match=r"privacy.noise_multiplier: got 1e\+06 x clip 1"):
        check_site_noise(Privacy(clip=1.0, noise_multiplier=1e6, noise="sites"), 2, secure=True)


@pytest.mark.parametrize("honest", [1, 4, 7])
def test_fewer_honest_sites_are_a_smaller_multiplier(honest: int) -> None:
    """Of 8 sites that should add noise: what is left of rho without the others, and what docs/federated.md says."""
    privacy = Privacy(clip=1.0, noise_multiplier=1.2, noise="sites")
    left = math.sqrt(honest) * site_deviation(privacy, 8)
    said = Privacy(clip=1.0, noise_multiplier=1.2 * math.sqrt(honest / 8), noise="sites")
    assert left == pytest.approx(said.noise_multiplier * said.clip)
    assert concentrated(said, honest, 8, 100) == pytest.approx(concentrated(privacy, 8, 8, 100) * 8 / honest, rel=1e-6)
