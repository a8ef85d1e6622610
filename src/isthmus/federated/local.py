"""A client at work on one resident module: the `Local` that algorithms are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.federated.resident import Resident
from isthmus.rng import orders

Batch = Mapping[str, Tensor]


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a client's local training. The defaults are those of Parrot."""

    epochs: Annotated[int, Meta(ge=1)] = 1
    """Passes over a client's data in a round."""
    batch_size: Annotated[int, Meta(ge=1)] = 20
    """Samples per step of a client."""
    learning_rate: Annotated[float, Meta(gt=0)] = 0.05
    """Of a client's SGD."""
    drop_last: bool = False
    """An epoch leaves out a last batch that is smaller than the others: batch norm cannot train on one sample. A client
    with less than one batch has that one."""
    micro_batches: Annotated[int, Meta(ge=1)] = 1
    """Equal parts of a batch whose gradients are added up: a client that is a pipeline has so many under way at once. A
    batch that cannot be cut into as many has fewer."""

    def used(self, samples: int) -> int:
        """Samples that an epoch goes through, of a client that has so many."""
        return samples - samples % self.batch_size if self.drop_last and samples > self.batch_size else samples

    def steps(self, samples: int) -> int:
        """Batches that a client of so many samples has in all epochs."""
        return self.epochs * -(-self.used(samples) // self.batch_size)


class Workspace:
    """Vectors to train in, kept from client to client: fresh memory of a large model costs as much as a step."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._vectors: list[Tensor] = []
        self._used = 0

    def rewind(self) -> None:
        """All vectors are free again."""
        self._used = 0

    def take(self) -> Tensor:
        if self._used == len(self._vectors):
            self._vectors.append(self._resident.empty(self._resident.size))
        self._used += 1
        return self._vectors[self._used - 1]


class ConfiguredLocal:
    """What every client at work has of its settings and its number of samples."""

    def __init__(self, config: LocalConfig, samples: int) -> None:
        self._config = config
        self.samples = samples

    @property
    def learning_rate(self) -> float:
        return self._config.learning_rate

    @property
    def steps(self) -> int:
        return self._config.steps(self.samples)


class PlainLocal(ConfiguredLocal):
    """One client in one round: its whole data, its order of batches."""

    def __init__(
        self,
        resident: Resident,
        workspace: Workspace,
        config: LocalConfig,
        data: Batch,
        *,
        seed: int,
        round_: int,
        client: int,
    ) -> None:
        super().__init__(config, len(next(iter(data.values()))))
        self._resident = resident
        self._workspace = workspace
        self._data = data
        self._key = (seed, round_, client)
        self._used = config.used(self.samples)
        workspace.rewind()

    def start(self, model: Tensor) -> Tensor:
        return self._workspace.take().copy_(model)

    def batches(self) -> Iterator[Batch]:
        """The client's own permutation per epoch, in batches of which the last may be smaller."""
        seed, round_, client = self._key
        drawn = torch.from_numpy(orders(seed, round_, [client], self.samples, self._config.epochs)[0])
        for order in self._resident.up(drawn):
            shuffled = {name: column[order] for name, column in self._data.items()}
            yield from _slices(shuffled, self._used, self._config.batch_size)

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        return self._resident.gradient(weights, batch)

    def descend(self, model: Tensor) -> Tensor:
        """The first step reads the model where it lies and the last one leaves the change: to copy a large model and to
        subtract it takes as long as a step."""
        change, weights = self._workspace.take(), model
        rate, steps = self._config.learning_rate, self.steps
        for number, batch in enumerate(self.batches(), 1):
            if number < steps:
                self._resident.descend(weights, batch, rate, out=change)
                weights = change
            else:
                self._resident.arrive(weights, batch, rate, model, out=change)
        return change

    def full_gradient(self, weights: Tensor) -> Tensor:
        total = self._workspace.take().zero_()
        for batch in _slices(self._data, self._used, self._config.batch_size):
            share = len(next(iter(batch.values()))) / self._used
            total.add_(self._resident.gradient(weights, batch), alpha=share)
        return total


def _slices(data: Batch, samples: int, size: int) -> Iterator[Batch]:
    for start in range(0, samples, size):
        yield {name: column[start : min(start + size, samples)] for name, column in data.items()}
