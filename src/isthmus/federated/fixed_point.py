"""Sums that do not depend on the order of their terms: multiples of 2^-36 in 64-bit integers.

Floating-point addition is not associative, so a mean taken over executors would depend on who trained whom. Integers
are: any grouping, any order, taking a term back out, all give the same bits. Every term is first scaled by a power of
two that the whole cohort shares (`scale_exponent`), so that the sum of them fits. A parameter of a partial sum takes
8 bytes. (Rejected: two limbs of 64 bits, which double the traffic for digits below a float's own error; float64
sums of rounded terms, which hold 10 bits less.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isthmus.errors import PeerError

FRACTION_BITS = 36
"""A term is rounded to a multiple of 2^-36, after scaling: 1.5e-11 of the largest mean that is of size 1."""
BYTES_PER_NUMBER = 8
_LIMIT = 2.0**51
_SUM_LIMIT = 2.0**62
_MAGIC = 1.5 * 2.0**52
"""Added to a double below 2^51 it leaves the rounded integer in the low bits: 5 times faster than a conversion."""
_MAGIC_BITS = int(torch.tensor(_MAGIC, dtype=torch.float64).view(torch.int64))
_BLOCK = 1 << 15
"""Numbers that are scaled, rounded and added while they lie in the processor's second cache."""


def scale_exponent(total: float) -> int:
    """The power of two by which terms are divided, for weights that add up to `total` at most."""
    return max(0, math.ceil(math.log2(total))) if total > 1 else 0


class FixedSum:
    """A sum of vectors of `size` numbers, each times a weight. `exponent` is the cohort's, equal on all executors."""

    def __init__(self, size: int, exponent: int) -> None:
        self.total = torch.empty(size, dtype=torch.int64)
        self._work = torch.empty(min(size, _BLOCK), dtype=torch.float64)
        self.begin(exponent)

    def begin(self, exponent: int) -> None:
        """Nothing is added yet; the memory stays."""
        self.total.zero_()
        self._bound = 0.0
        self._factor = math.ldexp(1.0, FRACTION_BITS - exponent)
        self._unit = math.ldexp(1.0, exponent - FRACTION_BITS)

    def add(self, term: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times a vector [size]. PeerError, and nothing added, if a number is not finite or too large."""
        factor, largest = weight * self._factor, 0.0
        term = term.detach().reshape(-1)
        for start in range(0, len(term), _BLOCK):
            here = min(_BLOCK, len(term) - start)
            work = self._work[:here]
            work.copy_(term[start : start + here]).mul_(factor)
            low, high = work.aminmax()
            found = max(-low.item(), high.item())
            if not (found < _LIMIT and low.item() == low.item()):
                self._take_back(term[:start], factor)
                within = f"{_LIMIT / factor:.3g}" if factor else "any bound"
                raise PeerError(f"got {_worst(term)}, expected numbers within {within}")
            largest = max(largest, found)
            rounded = work.add_(_MAGIC).view(torch.int64)
            self.total[start : start + here].add_(rounded.sub_(_MAGIC_BITS))
        self._bound += largest
        if self._bound >= _SUM_LIMIT:
            raise PeerError(f"a sum of {self._bound * self._unit:.3g} has no room in 64 bits")

    def add_rows(self, terms: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times every row of [terms, size]: the same bits as one by one. PeerError as `add`, and nothing
        added, if a number of any row is bad."""
        factor, largest, parts = weight * self._factor, 0.0, list[Tensor]()
        rows = terms.detach().reshape(len(terms), -1)
        for part in rows.split(max(1, _BLOCK // len(rows)), dim=1):
            work = part.to(torch.float64, copy=True).mul_(factor)
            low, high = work.aminmax()
            found = max(-low.item(), high.item())
            if not (found < _LIMIT and low.item() == low.item()):
                raise PeerError(f"got {_worst(terms)} among {len(rows)} terms")
            largest = max(largest, found)
            parts.append(work.add_(_MAGIC).view(torch.int64).sub_(_MAGIC_BITS).sum(0))
        bound = self._bound + largest * len(rows)
        if bound >= _SUM_LIMIT:
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")
        self._bound = bound
        self.total.add_(torch.cat(parts))

    def check_term(self, term: Tensor, weight: float) -> None:
        """PeerError if `weight` times the term could not be added. Nothing is changed."""
        low, high = term.detach().double().aminmax() if term.numel() else (torch.zeros(()), torch.zeros(()))
        largest = max(-low.item(), high.item()) * weight * self._factor
        if not (largest < _LIMIT and low.item() == low.item()):
            raise PeerError(f"got {_worst(term)}, expected numbers within {_LIMIT / (weight * self._factor):.3g}")
        if self._bound + largest >= _SUM_LIMIT:
            raise PeerError(f"a sum of {(self._bound + largest) * self._unit:.3g} has no room in 64 bits")

    def _take_back(self, term: Tensor, factor: float) -> None:
        """What was added of a term whose later numbers are bad."""
        for start in range(0, len(term), _BLOCK):
            here = min(_BLOCK, len(term) - start)
            work = self._work[:here].copy_(term[start : start + here]).mul_(factor)
            self.total[start : start + here].sub_(work.add_(_MAGIC).view(torch.int64).sub_(_MAGIC_BITS))

    def check(self, total: Tensor) -> float:
        """The bound of both sums, if another one's `total`, int64 [size], were added. PeerError when the two have no
        room."""
        bound = self._bound
        if len(total):
            low, high = total.aminmax()
            bound += max(-float(low), float(high))
        if bound >= _SUM_LIMIT:
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")
        return bound

    def merge(self, total: Tensor) -> None:
        """Add another sum's `total`, int64 [size], of the same exponent. PeerError as `check`, and nothing added."""
        self._bound = self.check(total)
        self.total.add_(total)

    def over(self, divisor: float, dtype: torch.dtype) -> Tensor:
        """The sum divided by `divisor`, [size]."""
        return self.total.to(torch.float64).mul_(self._unit / divisor).to(dtype)


def _worst(term: Tensor) -> float:
    bad = term[~torch.isfinite(term)]
    return float(bad[0]) if len(bad) else float(term.abs().max())
