"""Local differential privacy of values that leave a holder: what so many releases of one sample tell.

A release adds Gaussian noise of deviation m C to values whose joint norm is at most C. Local privacy is about one
sample put in another's place: both vectors lie in the ball of radius C, so they differ by at most 2 C (opposite vectors
do), and not by C, as where a sample is added or left out. Against that sensitivity the noise's multiplier is m / 2: one
release is mu-Gaussian differentially private with mu = 2 / m (Dong, Roth and Su 2022, Theorem 1). Releases, under
different multipliers too, compose to the square root of the sum of their mu^2 (Corollary 2 there), exactly.

There is no amplification by sampling: the receiver of a message knows which sample it is of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from isthmus.extensions import import_extra
from isthmus.plans import SampleRange

OWNER = "[privacy] activations"


def squared_mu(noise_multiplier: float, releases: int = 1) -> float:
    """mu^2 of so many releases of a sample."""
    return releases * (2 / noise_multiplier) ** 2


@lru_cache(maxsize=1 << 12)
def epsilon_of(mu_squared: float, delta: float) -> float:
    """By the exact conversion of the Gaussian mechanism (Balle and Wang 2018, Theorem 8), from dp-accounting."""
    if mu_squared == 0:
        return 0.0
    dp = import_extra("dp_accounting", OWNER)
    with np.errstate(divide="ignore"):  # of a logarithm that is minus infinity, as it is to be
        return float(dp.get_epsilon_gaussian(1 / math.sqrt(mu_squared), delta))


def noise_multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """The smallest with which so many releases of a sample have this epsilon together."""
    dp = import_extra("dp_accounting", OWNER)
    return 2 * float(dp.get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)


def spent_by_epoch(stretches: Sequence[SampleRange], size: int) -> list[float]:
    """After each pass over `size` samples, the largest sum of mu^2 that any of them has: that of each pass added up.

    A pass uses each sample once, in an order of its own. Exact where all of a pass is sent equally often, else an upper
    bound.
    """
    passes = -(-max((s.end for s in stretches), default=0) // size)
    each = (_deepest(_within(stretches, e * size, (e + 1) * size)) for e in range(passes))
    return list(itertools.accumulate(each))


def _within(stretches: Iterable[SampleRange], first: int, end: int) -> list[SampleRange]:
    clipped = (SampleRange(first=max(s.first, first), end=min(s.end, end), mu_squared=s.mu_squared) for s in stretches)
    return [s for s in clipped if s.first < s.end]


def _deepest(stretches: Sequence[SampleRange]) -> float:
    """The largest sum over the stretches that share a position."""
    starts = {s.first for s in stretches}
    return max((math.fsum(s.mu_squared for s in stretches if s.first <= at < s.end) for at in starts), default=0.0)
