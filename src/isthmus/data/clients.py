"""Data that belongs to clients: shared out, or in files, one client per file. A client's samples are read when it
trains, never before."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from isthmus.combinations import refused
from isthmus.data.client_files import KIND as CLIENTS
from isthmus.data.client_files import ClientsOptions, client_files
from isthmus.data.dataset import (
    Array,
    Blocked,
    ColumnSpec,
    Dataset,
    as_tensors,
    batch_of_round,
    fingerprint_of,
    joined,
    joined_columns,
)
from isthmus.data.partition import Partition, PartitionSpec, partition
from isthmus.data.registry import DataSpec, load_client, load_dataset
from isthmus.data.text import TextOptions, check_text, files_of
from isthmus.data.tokenizer import BYTES, load_tokenizer
from isthmus.errors import UserError
from isthmus.extensions import read_options

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

    def owners(self, column: str) -> NDArray[np.generic]:
        """(samples,) a column's values, texts or whole numbers: whose each sample is. UserError for another column."""
        ...


@runtime_checkable
class Named(Protocol):
    """Client data whose clients may have names, as those of files."""

    @property
    def names(self) -> Sequence[str]:
        """(clients,) in the order of their numbers; empty where they have none."""
        ...


class PartitionedData:
    """A data set shared out among clients."""

    def __init__(self, dataset: Dataset, parts: Partition, without: str = "", names: Sequence[str] = ()) -> None:
        """`without` is the column that said whose a sample is, and `names` are its values."""
        self.names = names
        self._dataset = dataset
        self._parts = parts
        self._columns = tuple(name for name in dataset.columns if name != without)
        self._drawn = (0, 0)

    def of_round(self, seed: int, round_: int) -> PartitionedData:
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


class GroupedClients:
    """Several clients of a population as one, in their order: what a site that holds them all has."""

    def __init__(self, data: ClientData, groups: int) -> None:
        """Each of `groups` has as many, or one more. UserError for fewer clients than groups."""
        if groups > (clients := len(data.sizes)):
            raise UserError(
                f"federated.partition.clients: got {groups}, expected at most the {clients} clients of the data"
            )
        self._data = data
        self._first = np.arange(groups + 1) * clients // groups
        self.sizes = np.add.reduceat(data.sizes, self._first[:-1])

    def of_round(self, seed: int, round_: int) -> GroupedClients:
        drawn = copy.copy(self)
        drawn._data = self._data.of_round(seed, round_) if isinstance(self._data, Redrawn) else self._data
        return drawn

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._data.columns

    @property
    def fingerprint(self) -> str:
        return fingerprint_of({"kind": "grouped", "data": self._data.fingerprint}, [self._first])

    def load(self, client: int) -> dict[str, torch.Tensor]:
        return self.load_many([client])

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        return self._data.load_many([one for c in clients for one in range(*map(int, self._first[c : c + 2]))])


def divided(spec: DataSpec, parts: PartitionSpec | None, seed: int) -> ClientData:
    """The population of data that `parts` share out, or that come by files. UserError as `share_out`."""
    by_files = parts is None or parts.scheme == "files"
    if by_files and spec.kind == CLIENTS:
        data: ClientData = ClientFolders(read_options(CLIENTS, spec.located, ClientsOptions))
    elif by_files and spec.kind == "text":
        data = TextClients(read_options("text", spec.located, TextOptions))
    else:
        assert parts is not None, "other data are shared out"
        data = share_out(load_dataset(spec, "train"), parts, seed)
    held = parts is not None and parts.scheme in ("natural", "files") and parts.clients
    return GroupedClients(data, held) if held else data


def share_out(dataset: Dataset, spec: PartitionSpec, seed: int) -> PartitionedData:
    """UserError as `partition`, and for a stream. A natural column is no column of the clients' samples any more."""
    refuse_stream(dataset)
    natural = spec.scheme == "natural"
    names: list[str] = []
    if natural and isinstance(dataset, Owned):
        try:
            owners = dataset.owners(spec.column)
        except UserError as e:
            raise UserError(f"federated.partition.column: {e}") from None
        values, owner = np.unique(owners, return_inverse=True)
        if values.tolist() != list(range(len(values))):
            names = [str(value) for value in values.tolist()]
        looked_at: dict[str, NDArray[np.generic]] = {spec.column: owner}
    else:
        needed = {"natural": spec.column, "dirichlet": spec.label, "shards": spec.label}.get(spec.scheme)
        if needed is not None and needed not in dataset.columns:
            has = ", ".join(sorted(dataset.columns))
            raise UserError(f"partition: the data has no column {needed!r}, it has: {has}")
        wanted = [n for n in (spec.label, spec.column) if n in dataset.columns]
        whole = dataset.batch(np.arange(len(dataset)), wanted)
        looked_at = {name: column.numpy() for name, column in whole.items()}
    parts = partition(spec, len(dataset), looked_at, seed)
    return PartitionedData(dataset, parts, without=spec.column if natural else "", names=names)


def refuse_stream(dataset: Dataset) -> None:
    """UserError for data that are read block by block."""
    if isinstance(dataset, Blocked):
        raise refused("streams", "federated", "a stream")


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
        self.names, self._paths = list(files), list(files.values())
        self._lengths = np.array([self._length(path) for path in self._paths], dtype=np.int64)
        self.sizes = (self._lengths - 1) // options.sequence_length
        short = np.flatnonzero(self.sizes < 1)
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
        check_text(text, path, self._options.tokenizer)
        return self._tokenizer.tokens(text[: self._options.max_bytes])

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        ids = ColumnSpec(dtype="int64", shape=(self._options.sequence_length,), limit=self._tokenizer.vocab_size)
        return {"input_ids": ids, "labels": ids}

    @property
    def fingerprint(self) -> str:
        """Digests names and lengths: to read all files for it would take as long as a round."""
        settings = {
            "kind": "text by files",
            "names": self.names,
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
        at = np.arange(self.sizes[client])[:, None] * length + np.arange(length)
        shift = int(self._options.shift_labels)
        arrays: dict[str, Array] = {
            "input_ids": tokens[at].astype(np.int64),
            "labels": tokens[at + shift].astype(np.int64),
        }
        return as_tensors(arrays)

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        return joined([self.load(client) for client in clients])


class ClientFolders:
    """A file or a folder for each client, read at the start for its number of samples and whenever it trains."""

    def __init__(self, options: ClientsOptions) -> None:
        """UserError for a client whose data cannot be read, or have other columns than the first one's."""
        self._files = client_files(options)
        parts: dict[str, Mapping[str, ColumnSpec]] = {}
        sizes: list[int] = []
        prints: list[str] = []
        for file in self._files:
            dataset = load_client(file, "train")
            parts[file.name] = dataset.columns
            sizes.append(len(dataset))
            prints.append(dataset.fingerprint)
        self.columns = joined_columns(parts)
        self.sizes = np.array(sizes, dtype=np.int64)
        self.names: Sequence[str] = list(parts)
        self.fingerprint = fingerprint_of({"kind": "clients", "clients": list(parts), "data": prints}, [])
        self._drawn = (0, 0)

    def of_round(self, seed: int, round_: int) -> ClientFolders:
        drawn = copy.copy(self)
        drawn._drawn = (seed, round_)
        return drawn

    def load(self, client: int) -> dict[str, torch.Tensor]:
        dataset = load_client(self._files[client], "train")
        return batch_of_round(dataset, np.arange(len(dataset)), list(self.columns), *self._drawn)

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        return joined([self.load(client) for client in clients])
