"""An executor's part of a pass: what its clients returned, folded together as each one ends.

What is summed takes 8 bytes a number and is the same for any grouping of clients. What is collected is kept per client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.federated.algorithms import Cohort, Combine, Update, Values
from isthmus.federated.fixed_point import FixedSum, scale_exponent

WEIGHT_BITS = 20
"""Weights are added in units of 2^-20: numbers of samples exactly."""
BUFFERS = "buffers"
"""The module's running means: averaged like FedAvg's model, whatever the algorithm."""


class Partial:
    """Folds updates, merges other partials, and makes the combined values of it all."""

    def __init__(self, returns: Mapping[str, Combine]) -> None:
        self._returns = returns
        self._sums: dict[str, FixedSum] = {}
        self.begin(1, 1)

    def begin(self, total_samples: int, clients: int) -> None:
        """Nothing is in yet; the memory stays. The numbers are the whole cohort's: they fix the scale of the sums."""
        self._exponents = {"weighted_mean": scale_exponent(total_samples), "mean": scale_exponent(clients)}
        self._exponents["sum"] = self._exponents["mean"]
        self._most_weight = float(max(total_samples, 1))
        self._collected: dict[int, Values] = {}
        self._weights: dict[int, int] = {}
        self._weight = 0
        self.clients = 0
        for name, total in self._sums.items():
            total.begin(self._exponents[self._returns[name]])

    @property
    def collects(self) -> bool:
        return "collect" in self._returns.values()

    def fold(self, client: int, update: Update, samples: int) -> None:
        """Take in a client's update. UserError for names that the pass does not declare; PeerError for numbers that
        are not finite, or a weight out of range. After an error nothing of the update is left."""
        _check_names(update.values, self._returns)
        weight = float(samples if update.weight is None else update.weight)
        if not 0 <= weight <= self._most_weight:
            raise PeerError(f"client {client}: got weight {weight:g}, expected 0 to {self._most_weight:g}")
        for name in self._of("collect"):
            _check_finite(client, name, update.values[name])
        added: list[tuple[FixedSum, Tensor, float]] = []
        for name in self._of("weighted_mean", "mean", "sum"):
            value = update.values[name]
            factor = weight if self._returns[name] == "weighted_mean" else 1.0
            try:
                total = self._sum(name, value.numel())
                total.add(value, factor)
            except PeerError as e:
                for other, term, used in added:
                    other.add(term, -used)
                raise PeerError(f"client {client}: value {name!r}: {e}") from None
            added.append((total, value, factor))
        if self.collects:
            self._collected[client] = {name: update.values[name].detach().clone() for name in self._of("collect")}
            self._weights[client] = _units(weight)
        self._weight += _units(weight)
        self.clients += 1

    def _of(self, *kinds: Combine) -> list[str]:
        return [name for name, combine in self._returns.items() if combine in kinds]

    def _sum(self, name: str, size: int) -> FixedSum:
        if name not in self._sums:
            self._sums[name] = FixedSum(size, self._exponents[self._returns[name]])
        found = self._sums[name]
        if len(found.total) != size:
            raise PeerError(f"got {size} numbers, expected {len(found.total)} as before")
        return found

    def tensors(self) -> dict[str, Tensor]:
        """What is sent: one int64 vector per summed value, and `CLIENT/NAME` per collected one."""
        found = {name: total.total for name, total in self._sums.items()} if self.clients else {}
        for client, values in sorted(self._collected.items()):
            found |= {f"{client}/{name}": value for name, value in values.items()}
        return found

    def weights(self) -> tuple[int, dict[int, int]]:
        """The sum of the weights, and each client's where values are collected; in units of 2^-20."""
        return self._weight, dict(self._weights)

    def merge(self, tensors: Mapping[str, Tensor], clients: int, weight: int, weights: Mapping[int, int]) -> None:
        """Add what another partial's `tensors` and `weights` gave. PeerError for anything that does not fit."""
        sums = {name for name, combine in self._returns.items() if combine != "collect"}
        collected = sorted(set(tensors) - sums)
        if clients and not sums <= set(tensors):
            raise PeerError(f"sent no value {min(sums - set(tensors))!r}")
        for name in sorted(sums & set(tensors)):
            got = tensors[name]
            if got.dtype != torch.int64 or got.dim() != 1:
                raise PeerError(f"value {name!r}: got {got.dtype} {list(got.shape)}, expected int64 numbers in a row")
            self._sum(name, len(got)).merge(got)
        for key in collected:
            client, _, name = key.partition("/")
            if not client.isdecimal() or self._returns.get(name) != "collect" or int(client) not in weights:
                raise PeerError(f"sent a value {key!r} that the algorithm does not collect")
            self._collected.setdefault(int(client), {})[name] = tensors[key]
        self._weights.update(weights)
        self._weight += weight
        self.clients += clients

    def combined(self, dtype: torch.dtype) -> Values:
        """The server's view: means, sums, and collected values stacked [clients, ...] in the order of client numbers.

        UserError when no client's update is in, or all weights are 0.
        """
        found: Values = {}
        for name, combine in self._returns.items():
            if combine == "collect":
                found[name] = torch.stack([self._collected[c][name] for c in sorted(self._collected)])
                continue
            divisor = {"weighted_mean": math.ldexp(self._weight, -WEIGHT_BITS), "mean": self.clients, "sum": 1}[combine]
            if not divisor:
                raise UserError(f"value {name!r}: the weights of {self.clients} updates add up to 0")
            found[name] = self._sums[name].over(divisor, dtype)
        return found

    def cohort(self, population: int) -> Cohort:
        weights = tuple(math.ldexp(self._weights[c], -WEIGHT_BITS) for c in sorted(self._weights))
        return Cohort(clients=self.clients, population=population, weights=weights)


def _units(weight: float) -> int:
    return round(math.ldexp(weight, WEIGHT_BITS))


def _check_names(values: Values, returns: Mapping[str, Combine]) -> None:
    for name in values:
        if name not in returns:
            known: Sequence[str] = sorted(returns)
            raise UserError(
                f"algorithm: returned value {name!r} has no declared operation, declared: {', '.join(known)}"
            )
    for name in returns:
        if name not in values:
            raise UserError(f"algorithm: value {name!r} is declared, but a client did not return it")


def _check_finite(client: int, name: str, value: Tensor) -> None:
    if not bool(torch.isfinite(value).all()):
        raise PeerError(f"client {client}: value {name!r}: not all numbers are finite")
