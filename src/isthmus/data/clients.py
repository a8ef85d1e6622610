"""Data that belongs to clients. A client's samples are read when it trains, never before."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import ColumnSpec, Dataset, batch_of_round, fingerprint_of
from isthmus.data.partition import Partition, PartitionSpec, partition
from isthmus.errors import UserError

if TYPE_CHECKING:
    import torch


class ClientData(Protocol):
    """A population. Equal settings and content give equal samples everywhere."""

    @property
    def columns(self) -> Mapping[str, ColumnSpec]: ...

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(clients,) samples of each, all above 0. Known without reading samples."""
        ...

    @property
    def fingerprint(self) -> str: ...

    def load(self, client: int) -> dict[str, torch.Tensor]:
        """All samples of a client, [samples, *shape] per column."""
        ...

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        """All samples of several clients, one client after another."""
        ...


@runtime_checkable
class Redrawn(Protocol):
    """Client data whose samples may be drawn anew in every round."""

    def of_round(self, seed: int, round_: int) -> ClientData:
        """The same clients with the samples of this round."""
        ...


@runtime_checkable
class Owned(Protocol):
    """A data set that says whose its samples are."""

    def owners(self, column: str) -> NDArray[np.int64]:
        """(samples,) the clients, from 0, by a column's values. UserError for a column that does not say."""
        ...


class PartitionedData:
    """A data set shared out among clients."""

    def __init__(self, dataset: Dataset, parts: Partition, without: str = "") -> None:
        """`without` is the column that said whose a sample is."""
        self._dataset = dataset
        self._parts = parts
        self._columns = tuple(name for name in dataset.columns if name != without)
        self._drawn = (0, 0)

    def of_round(self, seed: int, round_: int) -> PartitionedData:
        """As `Redrawn`."""
        drawn = copy.copy(self)
        drawn._drawn = (seed, round_)
        return drawn

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return {name: self._dataset.columns[name] for name in self._columns}

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self._parts.sizes

    @property
    def fingerprint(self) -> str:
        arrays = (self._parts.order, self._parts.offsets)
        return fingerprint_of({"kind": "partitioned", "data": self._dataset.fingerprint}, arrays)

    def load(self, client: int) -> dict[str, torch.Tensor]:
        return batch_of_round(self._dataset, self._parts.samples(client), self._columns, *self._drawn)

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        return batch_of_round(self._dataset, self._parts.samples_of(clients), self._columns, *self._drawn)


def share_out(dataset: Dataset, spec: PartitionSpec, seed: int) -> PartitionedData:
    """UserError as `partition`. A natural column is read, and is no column of the clients' samples any more."""
    natural = spec.scheme == "natural"
    if natural and isinstance(dataset, Owned):
        looked_at: dict[str, NDArray[np.generic]] = {spec.column: dataset.owners(spec.column)}
    else:
        needed = {"natural": spec.column, "dirichlet": spec.label, "shards": spec.label}.get(spec.scheme)
        if needed is not None and needed not in dataset.columns:
            has = ", ".join(sorted(dataset.columns))
            raise UserError(f"partition: the data has no column {needed!r}, it has: {has}")
        wanted = [n for n in (spec.label, spec.column) if n in dataset.columns]
        whole = dataset.batch(np.arange(len(dataset)), wanted)
        looked_at = {name: column.numpy() for name, column in whole.items()}
    parts = partition(spec, len(dataset), looked_at, seed)
    return PartitionedData(dataset, parts, without=spec.column if natural else "")
