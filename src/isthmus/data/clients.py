"""Data that belongs to clients: shared out, or in files, one client per file. A client's samples are read when it
trains, never before."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import Array, Blocked, ColumnSpec, Dataset, as_tensors, batch_of_round, fingerprint_of, joined
from isthmus.data.partition import Partition, PartitionSpec, partition
from isthmus.data.text import TextOptions, files_of
from isthmus.data.tokenizer import BYTES, load_tokenizer
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
    """UserError as `partition`, and for a stream. A natural column is read, and is no column of the clients' samples
    any more."""
    refuse_stream(dataset)
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


def refuse_stream(dataset: Dataset) -> None:
    """UserError for data that are read block by block."""
    if isinstance(dataset, Blocked):
        raise UserError(
            "data: got a stream in a federated job, expected data that are read whole: a client's samples are held "
            "together while it trains"
        )


class TextClients:
    """The files of the training split, in the order of their names. Columns as those of `TokenWindows`.

    With the tokenizer `bytes` sizes come of the files' lengths; any other reads every file once, at the start.
    `max_bytes` bounds each client's text.
    """

    def __init__(self, options: TextOptions) -> None:
        """UserError for files that are missing, and for one that is too short for a single window."""
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        files = files_of(options, "train")
        self._names, self._paths = list(files), list(files.values())
        self._lengths = np.array([self._length(path) for path in self._paths], dtype=np.int64)
        self._sizes = (self._lengths - 1) // options.sequence_length
        short = np.flatnonzero(self._sizes < 1)
        if len(short):
            raise UserError(
                f"text: client {short[0]} has no data: {self._paths[short[0]]} holds {self._lengths[short[0]]} tokens, "
                f"expected at least sequence_length + 1 = {options.sequence_length + 1}"
            )

    def _length(self, path: Path) -> int:
        if self._options.tokenizer != BYTES:
            return len(self._tokens(path))
        most = self._options.max_bytes
        size = path.stat().st_size
        return size if most is None else min(size, most)

    def _tokens(self, path: Path) -> NDArray[np.integer]:
        try:
            text = path.read_bytes()
        except OSError as e:
            raise UserError(f"text option 'files': cannot read {path}: {e.strerror}") from e
        return self._tokenizer.tokens(text[: self._options.max_bytes])

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        ids = ColumnSpec(dtype="int64", shape=(self._options.sequence_length,), limit=self._tokenizer.vocab_size)
        return {"input_ids": ids, "labels": ids}

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self._sizes

    @property
    def fingerprint(self) -> str:
        """Of names and lengths: to read all files for it would take as long as a round."""
        settings = {
            "kind": "text by files",
            "names": self._names,
            "sequence_length": self._options.sequence_length,
            "shift": self._options.shift_labels,
            "tokenizer": self._tokenizer.identity,
        }
        return fingerprint_of(settings, [self._lengths])

    def load(self, client: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens(self._paths[client])
        if len(tokens) != self._lengths[client]:
            raise UserError(f"text: {self._paths[client]} has changed since the run began")
        length = self._options.sequence_length
        at = np.arange(self._sizes[client])[:, None] * length + np.arange(length)
        shift = int(self._options.shift_labels)
        arrays: dict[str, Array] = {
            "input_ids": tokens[at].astype(np.int64),
            "labels": tokens[at + shift].astype(np.int64),
        }
        return as_tensors(arrays)

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        return joined([self.load(client) for client in clients])
