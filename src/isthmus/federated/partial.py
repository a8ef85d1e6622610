"""An executor's part of a pass: what its clients returned, folded together as each one ends.

What is summed takes 8 bytes a number and is the same for any grouping of clients. What is collected is kept per client.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.errors import DivergedUpdate, PeerError, UserError
from isthmus.federated.algorithms import ClientUpdate, Cohort, Combine, Values
from isthmus.federated.buffers import is_buffer
from isthmus.federated.fixed_point import FRACTION_BITS, DeviceSum, Down, FixedSum, scale_exponent
from isthmus.training.finite import is_finite
from isthmus.wire_types import Client, Table

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
