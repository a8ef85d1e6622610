"""Samples that are drawn anew in every epoch: by (seed, epoch, sample), wherever and whenever they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import Dataset, Indices
from isthmus.data.order import SampleOrder

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Augmented(Protocol):
    """What a data set with random transforms has besides `Dataset`."""

    def drawn(
        self, indices: Indices, columns: Sequence[str], seed: int, epochs: NDArray[np.int64]
    ) -> dict[str, torch.Tensor]:
        """As `Dataset.batch`, each sample as it is in its epoch: `epochs` is [len(indices)]. Equal arguments give
        equal batches."""
        ...


def batch_at(
    dataset: Dataset, order: SampleOrder, start: int, count: int, columns: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The samples at the positions start .. start + count - 1 of the order."""
    indices = order.indices(start, count)
    if isinstance(dataset, Augmented):
        return dataset.drawn(indices, columns, order.seed, order.epochs(start, count))
    return dataset.batch(indices, columns)


def batch_of_round(
    dataset: Dataset, indices: Indices, columns: Sequence[str], seed: int, round_: int
) -> dict[str, torch.Tensor]:
    """In federated training, where a client reads its samples once a round, a round is an epoch."""
    if isinstance(dataset, Augmented):
        return dataset.drawn(indices, columns, seed, np.full(len(indices), round_, dtype=np.int64))
    return dataset.batch(indices, columns)
