"""An executor's part of a pass: what its clients returned, folded together as each one ends.

What is summed takes 8 bytes a number and is the same for any grouping of clients. What is collected is kept per client.

Sums do not depend on the order of their summands: they are multiples of 2^-36 in 64-bit integers, on the host or on an
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
import reprlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import DivergedUpdate, PeerError, UserError
from isthmus.federated.algorithms import ClientUpdate, Cohort, Combine, Values
from isthmus.federated.resident import is_buffer
from isthmus.training.finite import is_finite
from isthmus.wire_types import Client, Table

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


FAINT = 2.0**8  # sums of fewer units have lost digits that a float has
WEIGHT_BITS = 20  # weights are added in units of 2^-20: numbers of samples exactly


Units = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # units up to those of eight trillion samples together


class AggregationWeights(msgspec.Struct, frozen=True, kw_only=True):
    """How much a partial counts, in units of 2^-20."""

    clients: Client
    total: Units
    each: Table[Client, Units] = {}  # the weight of each client, where values are collected


class PartialSum:
    """Folds updates, merges other partials, and makes the combined values of it all."""

    def __init__(
        self,
        returns: Mapping[str, Combine],
        sizes: Mapping[str, int] | None = None,
        accumulators: Mapping[str, Tensor] | None = None,
        *,
        down: Down | None = None,
    ) -> None:
        """`sizes` are the numbers of each summed value; without them, those of the first that comes. `accumulators` is
        memory
        to add them up in, int64 [numbers]. With `down`, what is folded lies on an accelerator and adds up there."""
        self._down = down
        self._returns = returns
        self._accumulators = accumulators or {}
        self._expected = {**{name: len(total) for name, total in self._accumulators.items()}, **(sizes or {})}
        self._sums: dict[str, FixedSum] = {}
        self.begin(1, 1)

    def begin(self, total_samples: int, clients: int) -> None:
        """Nothing is in yet; the memory stays. The numbers are the whole cohort's: they fix the scale of the sums."""
        self._exponents = {"weighted_mean": scale_exponent(total_samples), "mean": scale_exponent(clients)}
        self._exponents["sum"] = self._exponents["mean"]
        self._most_weight = float(max(total_samples, 1))
        self._collected: dict[int, Values] = {}
        self._unknown: set[str] = set()  # sums of which the terms' sizes are not known, but those of parts
        self._weights: dict[int, int] = {}
        self._weight = 0
        self.clients = 0
        for name, total in self._sums.items():
            total.begin(self._exponents[self._returns[name]])

    @property
    def collects(self) -> bool:
        return "collect" in self._returns.values()

    def fold(self, client: int, update: ClientUpdate, samples: int) -> None:
        """Take in a client's update. UserError for names that the pass does not declare; PeerError for numbers that
        are not finite, or a weight out of range. After an error nothing of the update is left."""
        _check_names(update.values, self._returns)
        try:
            weight = self._weight_of(update, samples)
        except PeerError as e:
            raise PeerError(f"client {client}: {e}") from None
        for name in self._of("collect"):
            try:
                _check_finite(update.values[name])
            except PeerError as e:
                raise type(e)(f"client {client}: value {name!r}: {e}") from None
        added: list[tuple[FixedSum, Tensor, float]] = []
        for name in self._summed(update.values):
            value = update.values[name]
            factor = weight if self._returns[name] == "weighted_mean" else 1.0
            try:
                total = self._sum(name, value.numel(), value.device)
                total.add(value, factor)
            except PeerError as e:
                for other, term, used in added:
                    other.add(term, -used)
                raise type(e)(f"client {client}: value {name!r}: {e}") from None
            added.append((total, value, factor))
        if self.collects:
            down = self._down or (lambda value: value)
            collected = {name: down(update.values[name].detach()).clone() for name in self._of("collect")}
            self._collected[client] = collected
            self._weights[client] = _units(weight)
        self._weight += _units(weight)
        self.clients += 1

    def fold_rows(self, update: ClientUpdate, clients: int, samples: int) -> None:
        """Take in the updates of clients with as many samples each: values have a first dim of them. Nothing may be
        collected. Errors as `fold`, for all of them at once."""
        assert not self.collects, "collected values belong to a client each"
        _check_names(update.values, self._returns)
        weight = self._weight_of(update, samples)
        added: list[tuple[FixedSum, Tensor, float]] = []
        for name in self._summed(update.values):
            value, factor = update.values[name], weight if self._returns[name] == "weighted_mean" else 1.0
            try:
                total = self._sum(name, value[0].numel(), value.device)
                total.add_rows(value, factor)
            except PeerError:
                for other, summands, used in added:
                    other.add_rows(summands, -used)
                raise
            added.append((total, value, factor))
        self._weight += clients * _units(weight)
        self.clients += clients

    def check_update(self, update: ClientUpdate, samples: int) -> None:
        """PeerError, as `fold` would raise it for an update whose names and shapes are right. Nothing is changed."""
        weight = self._weight_of(update, samples)
        for name in self._summed(update.values):
            value = update.values[name]
            try:
                factor = weight if self._returns[name] == "weighted_mean" else 1.0
                self._sum(name, value.numel(), value.device).check_term(value, factor)
            except PeerError as e:
                raise type(e)(f"value {name!r}: {e}") from None

    def _weight_of(self, update: ClientUpdate, samples: int) -> float:
        weight = float(samples if update.weight is None else update.weight)
        if not 0 <= weight <= self._most_weight:
            raise PeerError(f"got weight {weight:g}, expected 0 to {self._most_weight:g}")
        if weight and not _units(weight):
            raise PeerError(f"got weight {weight:g}, expected 0, or at least 2^-{WEIGHT_BITS}, the unit of weights")
        return math.ldexp(_units(weight), -WEIGHT_BITS)  # as it is counted: else the mean of equal values is another

    def _of(self, *kinds: Combine) -> list[str]:
        return [name for name, combine in self._returns.items() if combine in kinds]

    def _summed(self, values: Mapping[str, Tensor]) -> list[str]:
        """The values that are summed, less the buffers that an update leaves as they are."""
        return [n for n, combine in self._returns.items() if combine != "collect" and (n in values or not is_buffer(n))]

    def _sum(self, name: str, size: int, device: torch.device | None = None) -> FixedSum:
        self._check_size(name, size)
        if name not in self._sums:
            exponent, accumulator = self._exponents[self._returns[name]], self._accumulators.get(name)
            down, device = self._down, device or torch.device("cpu")
            if down is None or device.type == "cpu":
                self._sums[name] = FixedSum(size, exponent, accumulator)
            else:
                self._sums[name] = DeviceSum(size, exponent, device, down, accumulator)
        return self._sums[name]

    def _check_size(self, name: str, size: int) -> None:
        expected = len(self._sums[name]) if name in self._sums else self._expected.get(name, size)
        if size != expected:
            raise PeerError(f"got {size} numbers, expected {expected}")

    def unit(self, name: str) -> float:
        """Return the integer of 1.0 in the sum of this value."""
        return math.ldexp(1.0, FRACTION_BITS - self._exponents[self._returns[name]])

    def _touched(self) -> dict[str, FixedSum]:
        """The sums that are sent: of a buffer that no client changed there is none."""
        return {n: total for n, total in self._sums.items() if not (is_buffer(n) and total.is_empty)}

    def tensors(self, *, whole: bool = False) -> dict[str, Tensor]:
        """Return the tensors to send: one int64 vector per summed value, and `CLIENT/NAME` per collected one. A buffer
        that no client changed is left out, or zeros if `whole`: then nobody sees which ones changed."""
        found = {name: total.total for name, total in self._touched().items()} if self.clients else {}
        if whole and self.clients:
            unchanged = [name for name in self._returns if is_buffer(name) and name not in found]
            found |= {name: self._sum(name, self._expected[name]).total for name in unchanged}
        for client, values in sorted(self._collected.items()):
            found |= {f"{client}/{name}": value for name, value in values.items()}
        return found

    def weights(self) -> AggregationWeights:
        return AggregationWeights(clients=self.clients, total=self._weight, each=dict(self._weights))

    def bounds(self) -> dict[str, float]:
        """Return the bound of each sum: no number of it is further from 0."""
        return {name: total.bound for name, total in self._touched().items()} if self.clients else {}

    def check(
        self,
        tensors: Mapping[str, Tensor],
        clients: Collection[int],
        part: AggregationWeights,
        bounds: Mapping[str, float] | None = None,
    ) -> Mapping[str, float]:
        """PeerError unless `tensors` and `part` are what another partial gives after folding these clients. Nothing
        is changed. Returns the largest number of each sum, so that `merge` need not look again; those whose `bounds`
        are given are believed, and not looked at."""
        if part.clients != len(clients):
            raise PeerError(f"sent sums of {part.clients} clients, expected {len(clients)}")
        most = part.clients * self._most_weight
        if not 0 <= part.total <= _units(most):
            raise PeerError(f"sent a weight of {math.ldexp(part.total, -WEIGHT_BITS):g}, expected 0 to {most:g}")
        collects = self._of("collect") if self.collects else []
        sums = set(self._of("weighted_mean", "mean", "sum")) if clients else set[str]()
        expected = sums | {f"{client}/{name}" for client in clients for name in collects}
        if not {name for name in expected if not is_buffer(name)} <= set(tensors) <= expected:
            raise PeerError(f"sent the values {_few(tensors)}, expected {_few(expected)}")
        if part.each.keys() != (set(clients) if collects else set[int]()):
            raise PeerError(f"sent weights of {len(part.each)} clients, expected those of its clients")
        largest_weight = max(part.each.values(), default=0)
        if collects and (sum(part.each.values()) != part.total or largest_weight > _units(self._most_weight)):
            raise PeerError("sent weights that are not those of its clients")
        largest: dict[str, float] = {}
        self._unknown |= tensors.keys() - (bounds or {}).keys()
        for name, value in tensors.items():
            try:
                if name in sums:
                    largest[name] = self._check_sum(name, value, (bounds or {}).get(name))
                else:
                    _check_finite(value)
            except PeerError as e:
                raise type(e)(f"value {name!r}: {e}") from None
        return largest

    def _check_sum(self, name: str, value: Tensor, bound: float | None) -> float:
        if value.dtype != torch.int64 or value.dim() != 1:
            raise PeerError(f"got {value.dtype} {list(value.shape)}, expected int64 numbers in a row")
        return self._sum(name, len(value)).check(value, bound)

    def merge(
        self, tensors: Mapping[str, Tensor], part: AggregationWeights, largest: Mapping[str, float] | None = None
    ) -> None:
        """Add what another partial's `tensors` and `weights` gave. It has passed `check`, which found `largest`. Its
        sums must not change until `settle` or `combined`."""
        for key, value in tensors.items():
            if self._returns.get(key, "collect") != "collect":
                self._sum(key, len(value)).merge(value, (largest or {}).get(key))
            else:
                client, _, name = key.partition("/")
                self._collected.setdefault(int(client), {})[name] = value
        self._weights.update(part.each)
        self._weight += part.total
        self.clients += part.clients

    def settle(self) -> None:
        """Read the sums that were merged."""
        for total in self._sums.values():
            total.settle()

    def faint(self) -> dict[str, float]:
        """The sums of which digits are lost, as no term is far above their unit: by name, what no mean is further
        from 0 than."""
        found: dict[str, float] = {}
        for name, total in self._sums.items():
            looked = total.bound > 0 or name in self._unknown
            if total.bound < FAINT and looked and not is_buffer(name):
                weight = self._weight * 2.0**-WEIGHT_BITS if self._returns[name] == "weighted_mean" else self.clients
                found[name] = max(total.bound, 1.0) / self.unit(name) / max(weight, 2.0**-WEIGHT_BITS)
        return found

    def combined(self, dtype: torch.dtype) -> Values:
        """The server's view: means, sums, and collected values stacked [clients, ...] in the order of client numbers;
        the mean changes of buffers that a client changed, float64. It ends the sums.

        Of no client only sums are known, which are 0. UserError for a mean of none, or where all weights are 0.
        """
        found: Values = {}
        for name, combine in self._returns.items():
            if combine == "collect":
                found[name] = _stacked(name, [self._collected[c][name] for c in sorted(self._collected)])
                continue
            if is_buffer(name) and (name not in self._sums or self._sums[name].is_empty):
                continue
            divisor = {"weighted_mean": math.ldexp(self._weight, -WEIGHT_BITS), "mean": self.clients, "sum": 1}[combine]
            if not divisor:
                raise UserError(f"value {name!r}: the weights of {self.clients} updates add up to 0")
            total = self._sums[name] if name in self._sums else self._sum(name, self._expected[name])
            found[name] = total.over(divisor, torch.float64 if is_buffer(name) else dtype)
        return found

    def cohort(self, population: int) -> Cohort:
        weights = tuple(math.ldexp(self._weights[c], -WEIGHT_BITS) for c in sorted(self._weights))
        return Cohort(clients=self.clients, population=population, weights=weights)


def _units(weight: float) -> int:
    return round(math.ldexp(weight, WEIGHT_BITS))


def _stacked(name: str, rows: Sequence[Tensor]) -> Tensor:
    """UserError for rows that do not fit together."""
    kinds = {(row.dtype, tuple(row.shape)) for row in rows}
    if len(kinds) > 1:
        text = " and ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in kinds)[:2])
        raise UserError(f"algorithm: collected value {name!r}: got {text}, expected one shape and type of all clients")
    return torch.stack(list(rows))


def _check_names(values: Values, returns: Mapping[str, Combine]) -> None:
    for name in values:
        if name not in returns:
            known: Sequence[str] = sorted(returns)
            raise UserError(
                f"algorithm: returned value {name!r} has no declared operation, declared: {', '.join(known)}"
            )
    for name in returns:
        if name not in values and not is_buffer(name):
            raise UserError(f"algorithm: value {name!r} is declared, but a client did not return it")


def _check_finite(value: Tensor) -> None:
    if not is_finite(value):
        raise DivergedUpdate("not all numbers are finite")


def _few(names: Iterable[str]) -> str:
    """Return some of the names that somebody else chose."""
    text = sorted(names)
    return ", ".join(reprlib.repr(name) for name in text[:4]) + (" ..." if len(text) > 4 else "") or "none"
