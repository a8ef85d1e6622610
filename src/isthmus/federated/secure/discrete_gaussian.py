"""Discrete Gaussian noise, exact: whole numbers x with probability proportional to exp(-x^2 / 2 sigma^2).

Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020, Algorithms 1 to 3: rejection from a
discrete Laplace distribution, of which every step is a coin that falls with probability exp(-gamma), gamma a fraction.

Many numbers are drawn at once. A coin is tossed by comparing 64 random bits with exp(-gamma) in floating point; where
the two are so close that rounding could decide, more bits are drawn and compared with more digits of the exact value.
So no probability is a rounded one, as it would be with noise of floating-point numbers (Mironov 2012).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

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
