"""What leaves a data holder under noise: norms, noise, gradients through the clip, and what it is counted as."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable
from statistics import NormalDist

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.lazy import Lazy
from torch import Tensor

from isthmus.disclosure import ActivationNoise, SampleRange
from isthmus.errors import UserError
from isthmus.graph.opgraph import Ref
from isthmus.training.local_privacy import (
    KEY_BYTES,
    Boundary,
    Privatizer,
    Released,
    SecretNoise,
    clip,
    epsilon_of,
    noise_multiplier_for,
    spent_by_epoch,
    squared_mu,
)

dp = Lazy("dp_accounting")

A, B = Ref("a"), Ref("b")
AXES = ((A, 0), (B, 1))


def boundary(most: float, deviation: float = 0.0) -> Boundary:
    return Boundary(values=AXES, per_sample=10, targets=(1,), clip=most, deviation=deviation)


def privatizer(most: float, deviation: float, *, draw: Callable[[], bytes] | None = None) -> Privatizer:
    released = Released(train=boundary(most, deviation), evaluation=boundary(most, deviation))
    keys = itertools.count(5)
    return Privatizer(released, keeps=True, draw_key=draw or (lambda: key_of(next(keys))))


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def values(samples: int, scale: float, seed: int = 0) -> dict[Ref, Tensor]:
    """Ten numbers per sample, in two tensors; of one the samples lie along the second axis."""
    draws = torch.Generator().manual_seed(seed)
    a = torch.randn(samples, 2, 2, generator=draws) * scale * torch.rand(samples, 1, 1, generator=draws)
    return {A: a, B: torch.randn(6, samples, generator=draws) * scale}


def norms(found: dict[Ref, Tensor]) -> Tensor:
    rows = torch.cat([found[A].double().flatten(1), found[B].double().t()], dim=1)
    return rows.norm(dim=1)


@given(st.integers(1, 9), st.floats(1e-3, 1e3), st.floats(1e-2, 1e2))
def test_no_sample_is_longer_than_the_clip_and_short_ones_stay(samples: int, scale: float, most: float) -> None:
    given_values = values(samples, scale)
    found = privatizer(most, 0.0).forward(0, given_values, training=True)
    before, after = norms(given_values), norms(found)
    assert bool((after <= most * (1 + 1e-6)).all())  # rounded to float32 once, after the clip
    short = before < most
    torch.testing.assert_close(after[short], before[short], rtol=0, atol=0)
    assert bool((after[~short] > most * (1 - 1e-6)).all())


def test_the_clip_itself_is_exact_in_float64() -> None:
    for most in (0.1, 1.0, 3.7):
        clipped = clip(values(500, 5.0), boundary(most))
        assert bool((clipped.scale * clipped.squared.sqrt() <= most * (1 + 1e-15)).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sample_that_is_not_finite_counts_as_zero_and_its_gradient_is_zero(bad: float) -> None:
    given_values = values(4, 1.0)
    given_values[A][2, 0, 1] = bad
    made = privatizer(1.0, 0.0)
    found = made.forward(0, given_values, training=True)
    assert norms(found)[2] == 0
    assert norms(found).isfinite().all()
    back = made.backward(0, {1: {ref: torch.ones_like(v) for ref, v in found.items()}})[-1]
    assert back[A][2].count_nonzero() == back[B][:, 2].count_nonzero() == 0
    assert all(bool(g.isfinite().all()) for g in back.values())


def test_noise_has_the_deviation_that_is_stated_and_hides_the_values() -> None:
    zeros = {A: torch.zeros(4000, 2, 2), B: torch.zeros(6, 4000)}
    found = privatizer(1.0, 2.5).forward(0, zeros, training=False)
    drawn = torch.cat([found[A].flatten(), found[B].flatten()]).double()
    standard_error = 2.5 / math.sqrt(2 * drawn.numel())
    assert float(drawn.std()) == pytest.approx(2.5, abs=5 * standard_error)
    assert abs(float(drawn.mean())) < 5 * 2.5 / math.sqrt(drawn.numel())
    inside = float((drawn.abs() < 2.5).double().mean())
    assert inside == pytest.approx(NormalDist().cdf(1) - NormalDist().cdf(-1), abs=0.02)


def test_no_release_draws_the_noise_of_another() -> None:
    made, same = privatizer(1.0, 1.0), values(3, 1.0)
    first, again, evaluated = (made.forward(0, same, training=mode) for mode in (True, True, False))
    assert not torch.equal(first[A], again[A])
    assert not torch.equal(first[A], evaluated[A])
    assert not torch.equal((first[A] - again[A]).flatten()[:4], (first[B] - again[B]).t().flatten()[:4])
    own = Privatizer(made.released, keeps=False)
    assert not torch.equal(own.forward(0, same, training=True)[A], own.forward(0, same, training=True)[A])


def test_a_release_draws_once_and_its_gradients_draw_nothing() -> None:
    """A stage that recomputes runs its operators again in the backward, not its release."""
    keys = iter([key_of(11), key_of(12)])
    made = privatizer(1.0, 1.0, draw=lambda: next(keys))
    found = made.forward(0, values(3, 1.0), training=True)
    made.backward(0, {1: {ref: torch.ones_like(v) for ref, v in found.items()}})
    assert next(keys) == key_of(12)


def test_noise_has_all_bits_of_its_key() -> None:
    """Torch's generator has 32: noise could be found by trying them all, and taken off."""
    for bit in (0, 31, 32, 63, 64, 255):
        one, other = (SecretNoise(key_of(number)).normal((4,)) for number in (1 << 7, 1 << 7 ^ 1 << bit))
        assert not torch.equal(one, other)
    assert torch.equal(SecretNoise(key_of(3)).normal((2, 3)).flatten(), SecretNoise(key_of(3)).normal((6,)))


def test_keys_are_drawn_from_the_system_whatever_torch_is_seeded_with(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = secrets.token_bytes
    monkeypatch.setattr(secrets, "token_bytes", lambda count: drawn.append(count) or real(count))
    same, found = values(3, 1.0), list[Tensor]()
    for _ in range(2):
        torch.manual_seed(1)
        found.append(Privatizer(privatizer(1.0, 1.0).released, keeps=False).forward(0, same, training=True)[A])
    assert drawn == [KEY_BYTES, KEY_BYTES]
    assert not torch.equal(*found)


@given(st.integers(1, 5), st.floats(0.05, 20.0), st.integers(0, 20))
def test_gradients_are_those_of_autograd_through_the_clip(samples: int, most: float, seed: int) -> None:
    given_values = {ref: v.double().requires_grad_() for ref, v in values(samples, 1.0, seed).items()}
    rows = torch.cat([given_values[A].flatten(1), given_values[B].t()], dim=1)
    factor = (most / rows.norm(dim=1)).clamp_max(1.0)
    released = {A: given_values[A] * factor.view(-1, 1, 1), B: given_values[B] * factor}
    back = {ref: torch.randn_like(v) for ref, v in released.items()}
    expected = torch.autograd.grad(list(released.values()), list(given_values.values()), list(back.values()))
    # Two stages took the values: each sends back its part, and a third, which holds data, took them as they were.
    parts = {2: back, 1: {A: back[A] * 0.25, B: back[B] * 0.25}, 3: {A: back[A]}}
    made = Privatizer(
        Released(train=Boundary(values=AXES, targets=(1, 2), clip=most, deviation=1.0), evaluation=Boundary()),
        keeps=True,
    )
    made.forward(7, given_values, training=True)
    untouched, through = made.backward(7, parts)
    assert torch.equal(untouched[A], back[A])
    for ref, gradient in zip(given_values, expected, strict=True):
        torch.testing.assert_close(through[ref], 1.25 * gradient)


def test_types_and_strides_are_those_of_the_values() -> None:
    given_values = {A: torch.randn(3, 4, 2).transpose(1, 2).bfloat16(), B: torch.randn(3, 6).t()}
    found = privatizer(1.0, 1.0).forward(0, given_values, training=True)
    for ref, value in given_values.items():
        assert (found[ref].dtype, found[ref].stride()) == (value.dtype, value.stride())


# What it is counted as


def by_hand(mu: float, delta: float) -> float:
    """Balle and Wang 2018, Theorem 8, solved by halving."""
    phi = NormalDist().cdf

    def of(epsilon: float) -> float:
        return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)

    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) > delta else (low, middle)
    return high


def test_one_release_is_a_gaussian_mechanism_of_sensitivity_two_clips() -> None:
    """Noise of deviation 4 clips against values that differ by at most 2 clips: mu = 1/2."""
    assert squared_mu(4.0) == 0.25
    assert epsilon_of(squared_mu(4.0), 1e-5) == pytest.approx(by_hand(0.5, 1e-5), rel=1e-6)
    assert epsilon_of(0.0, 1e-5) == 0.0


@pytest.mark.parametrize(("multiplier", "releases"), [(2.0, 1), (4.0, 7), (20.0, 30)])
def test_releases_compose_as_the_library_composes_them(multiplier: float, releases: int) -> None:
    accountant = dp.pld.PLDAccountant()
    accountant.compose(dp.GaussianDpEvent(multiplier / 2), releases)
    ours = epsilon_of(squared_mu(multiplier, releases), 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-2)
    assert ours <= accountant.get_epsilon(1e-5)  # the library's is rounded up to its grid


def test_a_target_is_met_by_all_releases_together() -> None:
    multiplier = noise_multiplier_for(3.0, 1e-6, 11)
    assert epsilon_of(squared_mu(multiplier, 11), 1e-6) == pytest.approx(3.0, rel=1e-6)


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 15)), max_size=5), st.integers(0, 9))
def test_what_is_counted_bounds_every_sample_and_is_reached(size: int, spans: list[tuple[int, int]], seed: int) -> None:
    """Against a count of every sample, in an order that differs from pass to pass."""
    stretches = [SampleRange(first=a, end=a + n, mu_squared=1.0 + k % 2) for k, (a, n) in enumerate(spans)]
    found = spent_by_epoch(stretches, size)
    draws = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(size, generator=draws).tolist() for _ in range(40)]
    spent = [0.0] * size
    for stretch in stretches:
        for position in range(stretch.first, stretch.end):
            spent[orders[position // size][position % size]] += stretch.mu_squared
    assert max(spent) <= (found[-1] if found else 0.0) + 1e-9
    whole = [SampleRange(first=0, end=3 * size, mu_squared=0.5)]
    assert spent_by_epoch(whole, size) == pytest.approx([0.5, 1.0, 1.5])


@pytest.mark.parametrize("given_noise", [{"clip": 1.0}, {"noise_multiplier": 1.0}, {"clip": 1.0, "clip_rms": 1.0}])
def test_one_clip_and_one_measure_of_noise(given_noise: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"privacy.activations: got (both|neither) .*, expected one of them"):
        msgspec.convert(given_noise, ActivationNoise)
    assert ActivationNoise(clip_rms=0.5, epsilon=1.0).norm(16) == 2.0
