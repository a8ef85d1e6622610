"""Distributed differential privacy: each site adds its share of discrete Gaussian noise to its update before it is
masked, so that the coordinator never sees a sum without noise.

Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation,
2021. In units of the exact sums, with a clip C, d numbers in an update and n sites that add noise:

    each site's noise      discrete Gaussian of variance (m C)^2 / minimum       m = noise_multiplier
    sensitivity            D = C + sqrt(d) / 2, for each number is rounded to a unit
    variance of the sum    S = n (m C)^2 / minimum
    concentrated privacy   rho = e^2 / 2, e = min( sqrt(D^2 / S + t d / 2), D / sqrt(S) + t sqrt(d) )
                           t = 10 sum over k < n of exp(-2 pi^2 S / n k / (k + 1))      (Theorem 1 there)

A round has `minimum` updates or more, or none: whichever sites drop out, S is (m C)^2 at least. Epsilon is that of
`minimum` sites. Of n sites the noise's deviation is sqrt(n / minimum) times what epsilon counts on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.federated.admission import Guarantee, Privacy
from isthmus.federated.fixed_point import FRACTION_BITS, scale_exponent
from isthmus.federated.secure.discrete_gaussian import RandomWords, discrete_gaussian

MOST_DEVIATION = 2.0**10
"""Largest deviation of a site's noise, in the update's own numbers: larger noise has no room in the sums."""


class SiteNoise:
    """Noise of one site. Each update's noise is drawn once, from the system's source of random numbers."""

    def __init__(self, privacy: Privacy, minimum: int, words: RandomWords | None = None) -> None:
        """`words` are another source in tests alone."""
        self._deviation = site_deviation(privacy, minimum)
        self._words = words or RandomWords()

    def cover(self, sums: Mapping[str, Tensor], unit: float) -> None:
        """Add noise to int64 sums of one update, in place; `unit` is what 1.0 is in them."""
        for name in sorted(sums):
            noise = discrete_gaussian((self._deviation * unit) ** 2, len(sums[name]), self._words)
            np.add(sums[name].numpy(), noise, out=sums[name].numpy())


def site_deviation(privacy: Privacy, minimum: int) -> float:
    return privacy.noise_multiplier * privacy.clip / math.sqrt(minimum)


def check_site_noise(privacy: Privacy | None, minimum: int, *, secure: bool) -> None:
    """UserError for noise of sites that cannot be."""
    if privacy is None or privacy.noise != "sites":
        return
    if not secure:
        raise refused("noise of sites", "sums in the open", "'sites'")
    if (deviation := site_deviation(privacy, minimum)) > MOST_DEVIATION:
        what = f"got {privacy.noise_multiplier:g} x clip {privacy.clip:g}, of which a site adds {deviation:.3g}"
        raise UserError(f"privacy.noise_multiplier: {what}, expected at most {MOST_DEVIATION:g}")


def concentrated(privacy: Privacy, minimum: int, clients: int, numbers: int) -> float:
    """rho of one pass, as in the module's docstring; `numbers` are in an update, `clients` in a round at most."""
    unit = math.ldexp(1.0, FRACTION_BITS - scale_exponent(clients))
    sensitivity = privacy.clip * unit + math.sqrt(numbers) / 2
    variance = (privacy.noise_multiplier * privacy.clip * unit) ** 2
    if not variance:
        what = f"got {privacy.noise_multiplier:g} x clip {privacy.clip:g}, less than a number has room for"
        raise UserError(f"privacy.noise_multiplier: {what}: expected more noise")
    each = variance / minimum
    apart = 10 * sum(math.exp(-2 * math.pi**2 * each * k / (k + 1)) for k in range(1, minimum))
    first = math.sqrt(sensitivity**2 / variance + apart * numbers / 2)
    second = sensitivity / math.sqrt(variance) + apart * math.sqrt(numbers)
    return min(first, second) ** 2 / 2


def distributed_guarantee(privacy: Privacy, rounds: int, passes: int, rho: float, repeated: int = 0) -> Guarantee:
    """Compute the guarantee of so many rounds with passes of this rho each, and those that were repeated, by the RDP
    accountant of Google's dp-accounting. UserError where that is not installed."""
    dp = import_extra("dp_accounting", "[privacy]")
    rdp = import_extra("dp_accounting.rdp", "[privacy]")
    accountant = rdp.RdpAccountant()
    accountant.compose(dp.ZCDpEvent(rho), (rounds + repeated) * passes)
    epsilon = float(accountant.get_epsilon(privacy.delta))
    return Guarantee(epsilon=epsilon, delta=privacy.delta, rounds=rounds, sampling_probability=None, unsampled=repeated)
