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

The noise is exact: whole numbers x with probability proportional to exp(-x^2 / 2 sigma^2).

Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020, Algorithms 1 to 3: rejection from a
discrete Laplace distribution, of which every step is a coin that falls with probability exp(-gamma), gamma a fraction.

Many numbers are drawn at once. A coin is tossed by comparing 64 random bits with exp(-gamma) in floating point; where
the two are so close that rounding could decide, more bits are drawn and compared with more digits of the exact value.
So no probability is a rounded one, as it would be with noise of floating-point numbers (Mironov 2012).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from torch import Tensor

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.federated.admission import Guarantee, Privacy
from isthmus.federated.partial import FRACTION_BITS, scale_exponent

Whole = NDArray[np.int64]
Words = NDArray[np.uint64]
MARGIN = 2.0**-38
"""Relative: floating-point errors of exp(-gamma) are below 2^-40 for every gamma whose exp is above 2^-64."""
MOST_SIGMA = 2.0**46  # larger numbers have no room in the sums
_BATCH = 1 << 16  # numbers that are drawn at once


class RandomWords:
    """64-bit numbers of one ChaCha20 stream: seeded by the system unless a key is given, which is for tests."""

    def __init__(self, key: bytes | None = None) -> None:
        self._stream = Cipher(ChaCha20(key or os.urandom(32), bytes(16)), mode=None).encryptor()

    def take(self, count: int) -> Words:
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")

    def below(self, bound: int, count: int) -> Whole:
        """Uniform whole numbers from 0 to `bound` - 1."""
        mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
        found = (self.take(count) & mask).astype(np.int64)
        while len(over := np.flatnonzero(found >= bound)):
            found[over] = (self.take(len(over)) & mask).astype(np.int64)
        return found


Exact = Callable[[int], Fraction]  # position in a batch -> its gamma


def coins(words: RandomWords, gammas: NDArray[np.float64], exact: Exact) -> NDArray[np.bool_]:
    """For each gamma, whether a coin of probability exp(-gamma) falls. `gammas` are `exact` ones, rounded."""
    bits = words.take(len(gammas))
    chances = np.exp(-gammas) * 2.0**64
    tossed = bits.astype(np.float64)  # rounded by 2^10 at most
    slack = MARGIN * chances + 2.0**12
    found = tossed < chances - slack
    for place in np.flatnonzero(~found & (tossed <= chances + slack)):
        found[place] = _falls(int(bits[place]), exact(int(place)), words)
    return found


def _falls(bits: int, gamma: Fraction, words: RandomWords) -> bool:
    """Return whether a uniform number whose first 64 binary digits are `bits` is below exp(-gamma)."""
    digits = 64
    while True:
        context = Context(prec=digits)  # a decimal digit for each binary one: far more than enough
        power = context.divide(Decimal(-gamma.numerator), Decimal(gamma.denominator))
        chance = Fraction(context.exp(power)) * 2**digits
        slack = Fraction(2**digits, 10 ** (digits - 8)) + chance / 10 ** (digits - 8)
        if bits + 1 <= chance - slack:
            return True
        if bits >= chance + slack:
            return False
        bits, digits = bits << 64 | int(words.take(1)[0]), digits + 64


def discrete_gaussian(variance: float, count: int, words: RandomWords) -> Whole:
    """So many independent numbers. The variance is that of the continuous distribution; the discrete one's is nearly
    the same, and never larger."""
    assert 0 < variance <= MOST_SIGMA**2, "a variance that sums can hold"
    found = [np.empty(0, dtype=np.int64)]
    while (missing := count - sum(map(len, found))) > 0:
        found.append(_accepted(Fraction(variance), min(2 * missing + 16, _BATCH), words)[:missing])
    return np.concatenate(found)


def _accepted(variance: Fraction, count: int, words: RandomWords) -> Whole:
    """Algorithm 3: those of about so many numbers of the Laplace distribution that are kept."""
    scale = math.isqrt(math.floor(variance)) + 1
    drawn = _laplace(scale, count, words)
    size, middle = np.abs(drawn), variance / scale
    gammas = (size - float(middle)) ** 2 / (2 * float(variance))
    return drawn[coins(words, gammas, lambda at: (int(size[at]) - middle) ** 2 / (2 * variance))]


def _laplace(scale: int, count: int, words: RandomWords) -> Whole:
    """Algorithm 2: whole numbers with probability proportional to exp(-|x| / scale), about so many."""
    rest = words.below(scale, count)
    rest = rest[coins(words, rest / scale, lambda at: Fraction(int(rest[at]), scale))]
    laps = np.zeros(len(rest), dtype=np.int64)
    going = np.arange(len(rest))
    while len(going):
        going = going[coins(words, np.ones(len(going)), lambda at: Fraction(1))]
        laps[going] += 1
    size = rest + scale * laps
    negative = (words.take(len(size)) & np.uint64(1)).astype(bool)
    return np.where(negative, -size, size)[~(negative & (size == 0))]  # or zero would come twice as often


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
