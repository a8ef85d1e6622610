"""A partition: a data set shared out among clients.

Every scheme gives each sample to one client at most, and every client at least one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.rng import stream

Integers = NDArray[np.int64]
Scheme = Literal["iid", "dirichlet", "quantity", "shards", "natural", "files"]


class PartitionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a data set is shared out.

    `dirichlet`: each label's samples by shares drawn from Dirichlet(alpha) (Hsu et al. 2019). `quantity`: sizes by
    shares drawn from Dirichlet(alpha), labels mixed. `shards`: sorted by label, `shards` pieces per client (McMahan et
    al. 2017). `natural`: by the values of `column`. `files`: a client per file of texts, or per file
    or folder of the kind `clients`.
    """

    scheme: Scheme = "iid"  # Who has which samples.
    clients: Annotated[int, Meta(ge=1)] | None = None
    """How many. Of `natural` and `files` the data say; with this number of those, each client has as many of them, in
    their order: a site that holds several."""
    alpha: Annotated[float, Meta(gt=0)] = 0.1  # With `dirichlet` and `quantity`: the smaller, the more clients differ.
    shards: Annotated[int, Meta(ge=1)] = 2  # With `shards`: pieces per client.
    label: str = "labels"  # With `dirichlet` and `shards`: the column of labels.
    column: str = "client"  # With `natural`: the column that names the client.


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of client i are `order[offsets[i] : offsets[i + 1]]`: 8 bytes a sample, whatever the clients."""

    order: Integers
    offsets: Integers

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Integers:
        """(clients,) samples of each."""
        return np.diff(self.offsets)

    def samples(self, client: int) -> Integers:
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def samples_of(self, clients: Sequence[int]) -> Integers:
        """Return the samples of several clients, one client after another."""
        chosen = np.asarray(clients, dtype=np.int64)
        sizes = self.sizes[chosen]
        before = np.cumsum(sizes) - sizes
        return self.order[np.repeat(self.offsets[chosen] - before, sizes) + np.arange(sizes.sum())]


def partition(spec: PartitionSpec, samples: int, columns: Mapping[str, NDArray[np.generic]], seed: int) -> Partition:
    """Share out `samples` samples; `columns` (samples,) are those that the scheme looks at.

    Raises UserError for more clients than samples, a missing column, and one that is not of whole numbers.
    """
    if spec.scheme == "natural":
        owner = np.unique(_whole(columns, spec.column), return_inverse=True)[1]
        return _grouped(owner.astype(np.int64), int(owner.max()) + 1)
    if spec.scheme == "files":
        raise UserError("federated.partition.scheme: got 'files' for data that are no text, expected another one")
    if spec.clients is None:
        raise UserError(
            f"federated.partition.clients: missing, expected the number of clients for scheme {spec.scheme!r}"
        )
    if spec.clients > samples:
        raise UserError(f"federated.partition.clients: got {spec.clients}, expected at most the {samples} samples")
    asked = _Asked(spec, spec.clients, samples, columns, stream(seed, "partition"))
    owner = _SCHEMES[spec.scheme](asked)
    return _grouped(_fed(owner, spec.clients), spec.clients)


class _Asked(NamedTuple):
    spec: PartitionSpec
    clients: int
    samples: int
    columns: Mapping[str, NDArray[np.generic]]
    draws: np.random.Generator


def _iid(asked: _Asked) -> Integers:
    return asked.draws.permutation(np.arange(asked.samples) % asked.clients)


def _dirichlet(asked: _Asked) -> Integers:
    spec, clients, samples, columns, draws = asked
    labels = _whole(columns, spec.label)
    owner = np.empty(samples, dtype=np.int64)
    for label in np.unique(labels):
        of_label = draws.permutation(np.flatnonzero(labels == label))
        owner[of_label] = _cut(draws.dirichlet(np.full(clients, spec.alpha)), len(of_label))
    return owner


def _quantity(asked: _Asked) -> Integers:
    spec, clients, samples, _, draws = asked
    owner = np.empty(samples, dtype=np.int64)
    owner[draws.permutation(samples)] = _cut(draws.dirichlet(np.full(clients, spec.alpha)), samples)
    return owner


def _shards(asked: _Asked) -> Integers:
    spec, clients, samples, columns, draws = asked
    pieces = clients * spec.shards
    if pieces > samples:
        raise UserError(
            f"federated.partition.shards: got {pieces} shards in all, expected at most the {samples} samples"
        )
    piece_of = np.arange(samples) * pieces // samples
    owner_of = draws.permutation(np.arange(pieces) % clients)
    owner = np.empty(samples, dtype=np.int64)
    owner[np.argsort(_whole(columns, spec.label), kind="stable")] = owner_of[piece_of]
    return owner


_SCHEMES = {"iid": _iid, "dirichlet": _dirichlet, "quantity": _quantity, "shards": _shards}


def _cut(shares: NDArray[np.float64], count: int) -> Integers:
    """(count,) owners in runs whose lengths follow the shares."""
    ends = np.round(np.cumsum(shares) * count).astype(np.int64)
    ends[-1] = count
    return np.searchsorted(ends, np.arange(count), side="right").astype(np.int64)


def _fed(owner: Integers, clients: int) -> Integers:
    """Each client without samples takes one from the client that has most: a client without data cannot train."""
    counts = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        owner = owner.copy()
        # One pass over samples by their owners' sizes, the largest first, leaving every owner one.
        order = np.argsort(-counts[owner], kind="stable")
        at = 0
        for client in empty:
            while counts[owner[order[at]]] < 2:
                at += 1
            counts[owner[order[at]]] -= 1
            owner[order[at]] = client
            at += 1
    return owner


def _grouped(owner: Integers, clients: int) -> Partition:
    counts = np.bincount(owner, minlength=clients)
    return Partition(np.argsort(owner, kind="stable").astype(np.int64), np.concatenate([[0], np.cumsum(counts)]))


def _whole(columns: Mapping[str, NDArray[np.generic]], name: str) -> Integers:
    if name not in columns:
        raise UserError(f"partition: the data has no column {name!r}, it has: {', '.join(sorted(columns))}")
    values = columns[name]
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise UserError(f"partition: column {name!r}: got {values.dtype} {list(values.shape)}, expected whole numbers")
    return values.astype(np.int64)
