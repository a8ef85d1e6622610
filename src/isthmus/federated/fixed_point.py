"""Sums that do not depend on the order of their summands: multiples of 2^-36 in 64-bit integers, on the host or on an
accelerator, with the same bits. The unit is fixed: all who add must know it before they see values, also where values
are masked. Numbers from 1.5e-11 to 6.7e7 have room; larger ones are refused, and smaller ones are logged.

Floating-point addition is not associative, so a mean taken over executors would depend on who trained whom. Integers
are: any grouping, any order, taking a term back out, all give the same bits. Every term is first scaled by a power of
two that the whole cohort shares (`scale_exponent`), so that the sum of them fits. A parameter of a partial sum takes
8 bytes. (Rejected: two limbs of 64 bits, which double the traffic for digits below a float's own error; float64
sums of rounded summands, which hold 10 bits less.)

Work on long vectors, number by number, on all cores: what is done between two rounds, while executors wait.

Threads are started for every call. Long vectors take milliseconds and a thread a twentieth of one, and executors are
forked from a process that keeps none.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import DivergedUpdate, PeerError

LEAST = 1 << 20  # numbers for each thread: fewer are done sooner than it starts


def parallel_chunks(act: Callable[[int, int], None], size: int, align: int = 1) -> None:
    """Call `act(start, stop)` for ranges that make up `size` numbers and begin at multiples of `align`, at the same
    time. Raises what one of them raised."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(cores, size // LEAST))
    step = -(-size // threads // align) * align or align
    ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
    errors: list[Exception] = []

    def run(start: int, stop: int) -> None:
        try:
            act(start, stop)
        except Exception as e:  # raised in the caller's thread
            errors.append(e)

    others = [threading.Thread(target=run, args=each, name="spread", daemon=True) for each in ranges[1:]]
    for other in others:
        other.start()
    try:
        for each in ranges[:1]:
            run(*each)
    finally:  # Ctrl-C as well: the memory is the caller's
        for other in others:
            other.join()
    for error in errors:
        raise error


FRACTION_BITS = 36
"""A term is rounded to a multiple of 2^-36, after scaling: 1.5e-11 of the largest mean that is of size 1."""
UNIT = 2.0**-FRACTION_BITS
BYTES_PER_NUMBER = 8
LIMIT = 2.0**51  # below it a term is rounded by `MAGIC`
SUM_LIMIT = 2.0**62  # bound of a term and of a sum: means of up to 2^26 = 6.7e7. A larger one has no room.
MAGIC = torch.tensor(1.5 * 2.0**52, dtype=torch.float64)
"""Added to a double below 2^51 it leaves the rounded integer in the low bits: 5 times faster than a conversion."""
MAGIC_BITS = int(MAGIC.view(torch.int64))
_ROWS_BLOCK = 1 << 19  # numbers of short rows that are added at once
_BLOCK = 1 << 17
"""Numbers that are scaled, rounded and added while they lie in the processor's caches; smaller blocks, for the second
cache alone, lose more in calls. Floats are torch's, whole numbers numpy's: it adds them up to four times as fast."""


def scale_exponent(total: float) -> int:
    """The power of two by which summands are divided, for weights that add up to `total` at most."""
    return max(0, math.ceil(math.log2(total))) if total > 1 else 0


class FixedSum:
    """A sum of vectors of `size` numbers, each times a weight. `exponent` is the cohort's, equal on all executors.

    The first vector is written, not added, so that nothing has to be zeroed before. Another sum that is merged is read
    when there is time for it (`settle`), or where it lies when the whole is divided: a pass over memory less.
    """

    def __init__(self, size: int, exponent: int, accumulator: Tensor | None = None) -> None:
        """`accumulator` is the memory to add up in, int64 [size]; without it the sum's own."""
        self._total = torch.empty(size, dtype=torch.int64) if accumulator is None else accumulator
        numbers = self._total.numpy()
        self._blocks = [numbers[start : start + _BLOCK] for start in range(0, size, _BLOCK)] or [numbers]
        self._work = torch.empty(min(size, _BLOCK), dtype=torch.float64)
        self._rounded = self._work.numpy().view(np.int64)
        self._merged: list[Tensor] = []  # not read yet
        self.begin(exponent)

    def begin(self, exponent: int) -> None:
        """Nothing is added yet; the memory stays, and is not touched."""
        self._empty = True
        self._bound = 0.0
        self._merged.clear()
        self._factor = math.ldexp(1.0, FRACTION_BITS - exponent)
        self._unit = math.ldexp(1.0, exponent - FRACTION_BITS)

    @property
    def total(self) -> Tensor:
        """The sum as integers, int64 [size]."""
        self.settle()
        return self._own()

    def _own(self) -> Tensor:
        if self._empty:
            self._total.zero_()
            self._empty = False
        return self._total

    @property
    def is_empty(self) -> bool:
        return self._empty and not self._merged

    @property
    def bound(self) -> float:
        """No number of the sum is further from 0."""
        return self._bound

    def __len__(self) -> int:
        return len(self._total)

    def add(self, term: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times a vector [size]. PeerError, and nothing added, if a number is not finite or too large."""
        factor, largest = weight * self._factor, 0.0
        parts = term.detach().reshape(-1).split(_BLOCK)
        for number, (part, total) in enumerate(zip(parts, self._blocks, strict=True)):
            found = largest_of(part) * abs(factor)
            if not found < SUM_LIMIT:
                self._take_back(parts[:number], factor)
                raise out_of_range(term, factor)
            largest = max(largest, found)
            rounded = self._round(part, factor, found)
            np.subtract(rounded, MAGIC_BITS, out=total if self._empty else rounded)
            if not self._empty:
                np.add(total, rounded, out=total)
        bound = self._bound_with(largest, weight)
        if bound >= SUM_LIMIT:
            self._take_back(parts, factor)
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")
        self._empty, self._bound = False, bound

    def _bound_with(self, largest: float, weight: float, rows: int = 1) -> float:
        """With `rows` terms of numbers of up to `largest`, which are rounded; less, where terms are taken back."""
        return max(0.0, self._bound + math.copysign(math.ceil(largest), weight) * rows)

    def _round(self, part: Tensor, factor: float, largest: float) -> NDArray[np.int64]:
        """A block's summands as integers, each with the magic number's bits on top. It lasts until the next block."""
        lifted(self._work[: len(part)].copy_(part), factor, largest)
        return self._rounded[: len(part)]

    def _take_back(self, parts: Sequence[Tensor], factor: float) -> None:
        """Subtract the parts that were added of a term whose later numbers are bad."""
        if not self._empty:
            for part, total in zip(parts, self._blocks, strict=False):
                np.subtract(total, self._round(part, factor, SUM_LIMIT) - MAGIC_BITS, out=total)

    def add_rows(self, summands: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times every row of [summands, size]: the same bits as one by one. PeerError as `add`, and
        nothing added, if a number of any row is bad."""
        factor = weight * self._factor
        rows = summands.detach().reshape(len(summands), -1)
        found = largest_of(rows) * abs(factor)
        if not found < SUM_LIMIT:
            raise PeerError(f"got {worst_of(summands)} among {len(rows)} summands")
        bound = self._bound_with(found, weight, len(rows))
        if bound >= SUM_LIMIT:
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")
        self._bound = bound
        width = max(1, _ROWS_BLOCK // len(rows))
        # The sum of the magic numbers' bits wraps around, and back when they are taken off.
        lift = np.array(len(rows) * MAGIC_BITS % 2**64, dtype=np.uint64).view(np.int64)
        own = self._total.numpy() if self._empty else self.total.numpy()
        for start, part in zip(range(0, len(own), width), rows.split(width, dim=1), strict=True):
            work, total = part.to(torch.float64, copy=True), own[start : start + width]
            rounded = lifted(work, factor, found).numpy().sum(axis=0)
            np.subtract(rounded, lift, out=total if self._empty else rounded)
            if not self._empty:
                np.add(total, rounded, out=total)
        self._empty = False

    def check_term(self, term: Tensor, weight: float) -> None:
        """PeerError if `weight` times the term could not be added. Nothing is changed."""
        largest = largest_of(term.detach()) * weight * self._factor
        if not largest < SUM_LIMIT:
            raise out_of_range(term, weight * self._factor)
        if (bound := self._bound_with(largest, weight)) >= SUM_LIMIT:
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")

    def check(self, total: Tensor, largest: float | None = None) -> float:
        """The largest number of another sum's `total`, int64 [size], looked for where it is not given. PeerError when
        the two have no room."""
        largest = largest_of(total) if largest is None else largest
        if not 0 <= largest < math.inf:
            raise PeerError(f"got numbers within {largest:g}, expected a bound")
        if (bound := self._bound + largest) >= SUM_LIMIT:
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")
        return largest

    def merge(self, total: Tensor, largest: float | None = None) -> None:
        """Add another sum's `total`, int64 [size], of the same exponent, whose `largest` number `check` has found; it
        must not change until `settle` or `over`. PeerError as `check`, and nothing added."""
        self._bound += self.check(total, largest)
        self._merged.append(total)

    def settle(self) -> None:
        """Read what was merged."""
        for other in self._merged:
            if self._empty:
                self._total.copy_(other)
                self._empty = False
            else:
                np.add(self._total.numpy(), other.numpy(), out=self._total.numpy())
        self._merged.clear()

    def over(self, divisor: float, dtype: torch.dtype) -> Tensor:
        """The sum divided by `divisor`, [size]. It ends the sum: nothing is in it any more."""
        factor, found = self._unit / divisor, torch.empty(len(self), dtype=dtype)
        summands = [t.numpy() for t in (self._merged if self._empty and self._merged else [self._own(), *self._merged])]

        def divide(start: int, stop: int) -> None:
            work, whole = torch.empty(_BLOCK, dtype=torch.float64), np.empty(_BLOCK, dtype=np.int64)
            for at in range(start, stop, _BLOCK):
                part = slice(at, min(at + _BLOCK, stop))
                number = summands[0][part]
                for other in summands[1:]:
                    number = np.add(number, other[part], out=whole[: len(number)])
                found[part].copy_(work[: len(number)].copy_(torch.from_numpy(number)).mul_(factor))

        parallel_chunks(divide, len(self), _BLOCK)
        self._merged, self._empty, self._bound = [], True, 0.0
        return found


def lifted(work: Tensor, factor: float, largest: float) -> Tensor:
    """`factor` times doubles, rounded half to even, as integers with the magic number's bits on top: int64, in the
    memory of `work`. None is further from 0 than `largest`, which is below `SUM_LIMIT`. A number's bits do not depend
    on the others."""
    if largest < LIMIT:
        return torch.add(MAGIC, work, alpha=factor, out=work).view(torch.int64)
    scaled = work * factor
    small = torch.add(MAGIC, work, alpha=factor).view(torch.int64)
    found = work.view(torch.int64)
    return found.copy_(torch.where(scaled.abs() < LIMIT, small, scaled.round().to(torch.int64) + MAGIC_BITS))


def out_of_range(term: Tensor, factor: float) -> DivergedUpdate:
    """Return the error of a term of which `factor` times a number has no room."""
    worst = worst_of(term)
    within = f"{SUM_LIMIT / abs(factor):.3g}" if factor else "any bound"
    why = ", the range of the exact sum: scale the loss or the data down" if math.isfinite(worst) else ""
    return DivergedUpdate(f"got {worst:g}, expected numbers within {within}{why}")


def largest_of(numbers: Tensor) -> float:
    """The largest distance from 0; not a number if there is one that is none."""
    if not numbers.numel():
        return 0.0
    if numbers.dtype == torch.bfloat16:  # which numpy does not know
        numbers = numbers.float()
    array = numbers.numpy()
    low, high = float(array.min()), float(array.max())
    return max(-low, high) if low == low else math.nan


def worst_of(term: Tensor) -> float:
    bad = term[~torch.isfinite(term)]
    return float(bad[0]) if len(bad) else float(term.abs().max())


Down = Callable[[Tensor], Tensor]  # a tensor of the accelerator -> its copy on the host
_SUM_BLOCK = 1 << 24  # numbers that are rounded at once: what that takes besides the sum is 16 bytes each


def sums_on(device: torch.device) -> bool:
    """Return whether it has double precision and 64-bit integers (Apple's GPUs have not)."""
    return device.type != "mps"


class DeviceSum(FixedSum):
    """An executor's sum on its accelerator. The host looks once per term: whether all its numbers are good."""

    def __init__(
        self, size: int, exponent: int, device: torch.device, down: Down, accumulator: Tensor | None = None
    ) -> None:
        """Make a `FixedSum`, in which `total` comes to lie when it is asked for."""
        super().__init__(size, exponent, accumulator)
        self._sum = torch.zeros(size, dtype=torch.int64, device=device)
        self._down = down

    def begin(self, exponent: int) -> None:
        super().begin(exponent)
        self._ahead = False  # something was added since `total` was asked for

    def add(self, term: Tensor, weight: float = 1.0) -> None:
        self._add(term.detach().reshape(1, -1), weight)

    def add_rows(self, summands: Tensor, weight: float = 1.0) -> None:
        self._add(summands.detach().reshape(len(summands), -1), weight)

    def _add(self, rows: Tensor, weight: float) -> None:
        factor = weight * self._factor
        ends = torch.stack(torch.aminmax(rows)) if rows.numel() else rows.new_zeros(2)
        largest = largest_of(self._down(ends)) * abs(factor)  # a number that is none is both ends
        if not largest < SUM_LIMIT:
            raise out_of_range(rows, factor)
        bound = self._bound_with(largest, weight, len(rows))
        if bound >= SUM_LIMIT:
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")
        if self._empty and not self._ahead:
            self._sum.zero_()
        width = max(1, _SUM_BLOCK // len(rows))
        for part, total in zip(rows.split(width, dim=1), self._sum.split(width), strict=True):
            found = lifted(part.to(torch.float64, copy=True), factor, largest)
            total.add_(found.sub_(MAGIC_BITS).sum(dim=0))
        self._bound, self._ahead = bound, True

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not self._ahead

    def _own(self) -> Tensor:
        if self._ahead:
            self._total.copy_(self._down(self._sum))
            self._ahead = self._empty = False
        return super()._own()
