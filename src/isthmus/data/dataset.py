"""The interface of data sets: columns of fixed shape, and samples of them on request, drawn anew in every epoch or
not."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from isthmus.data.layout import Layout
from isthmus.data.order import SampleOrder
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra
from isthmus.wire_types import Amount, Id, Shape

if TYPE_CHECKING:
    import torch


Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
Indices = Sequence[int] | npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]


class ColumnSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column: torch's dtype name, the shape of one sample, and for ids and classes, which are 0 or more, the limit
    they stay below. A column of labels of which some may be -100 has no limit."""

    dtype: Id
    shape: Shape = ()
    limit: Amount | None = None

    def __str__(self) -> str:
        below = "" if self.limit is None else f", below {self.limit}"
        return f"{self.dtype} {list(self.shape)}{below}"

    def fits(self, other: ColumnSpec) -> bool:
        """Return whether one column can hold the values of both: ids and classes may have other limits."""
        alike = (self.dtype, self.shape) == (other.dtype, other.shape)
        return alike and (self.limit is None) == (other.limit is None)


def may_be_left_out(column: ColumnSpec) -> bool:
    """Return whether it may hold labels that a loss leaves out (-100): whole numbers below no limit."""
    return column.dtype in ("int8", "int16", "int32", "int64") and column.limit is None


def any_left_out(columns: Mapping[str, ColumnSpec]) -> bool:
    """Return whether a loss may leave out labels of one of the columns."""
    return any(map(may_be_left_out, columns.values()))


class Dataset(Protocol):
    """A finite set of samples with random access. Equal settings and content give equal batches everywhere."""

    @property
    def columns(self) -> Mapping[str, ColumnSpec]: ...

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of what the samples hold: content and settings, but not where the files lie."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        """The asked columns of the asked samples, each [len(indices), *shape]; nothing else is materialised.

        Raises `UserError` for an unknown column, `IndexError` for an index outside 0 .. len - 1.
        """
        ...


class SamplesOf:
    """Samples of another data set, in an order of their own: its columns and its fingerprint."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._dataset.columns

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint


def missing_members(found: object) -> list[str]:
    """Return what an object lacks to be a `Dataset`. No property is computed: a fingerprint may take minutes."""
    has = set(dir(found))
    return [name for name in ("columns", "fingerprint", "batch", "__len__") if name not in has]


def checked(indices: Indices, size: int) -> npt.NDArray[np.int64]:
    """`indices` as an array. Raises `IndexError` where numpy would wrap a negative one silently."""
    positions = np.asarray(indices, dtype=np.int64)
    if positions.size and (positions.min() < 0 or positions.max() >= size):
        raise IndexError(f"samples {positions.min()} .. {positions.max()} of a data set of {size}")
    return positions


def check_columns(asked: Iterable[str], valid: Iterable[str]) -> None:
    """Raises `UserError` for a name in `asked` that is not in `valid`."""
    for name in asked:
        if name not in valid:
            raise unknown_name("column", name, valid)


def as_tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Torch is imported here, on first use: a coordinator counts samples on machines that have no torch."""
    torch = import_extra("torch", "the data")
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The samples of one part after those of another, column by column."""
    return as_tensors({name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]})


def fingerprint_of(settings: Mapping[str, object], arrays: Iterable[Array]) -> str:
    """sha256 (hex) over the settings and over each array's dtype, shape and bytes, in the order given."""
    digest = hashlib.sha256(msgspec.json.encode(dict(settings), order="sorted"))
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def held_out_count(size: int, holdout: float, what: str) -> int:
    """Return how many of `size` things are held out: at least one, and at least one is left; none if `holdout` is 0.

    Raises `UserError` where `size` is too small to share.
    """
    if holdout == 0:
        return 0
    if size < 2:
        raise UserError(f"{what}: {size} cannot be divided: expected at least 2, or holdout = 0")
    return min(max(1, round(holdout * size)), size - 1)


class NothingHeldOut(UserError):
    """Held-out samples were asked of data that holds none out."""


def refuse_empty_holdout(split: Split, holdout: float, what: str) -> None:
    """Raises `NothingHeldOut` where held-out samples are asked of data that holds none out."""
    if split == "heldout" and holdout == 0:
        raise NothingHeldOut(f"{what}: there are no held-out samples because holdout is 0")


def rows_of_split(size: int, holdout: float, split: Split, source: str) -> npt.NDArray[np.int64]:
    """The rows of `split` in their own order, drawn at random because files are often sorted by class."""
    refuse_empty_holdout(split, holdout, source)
    kept = size - held_out_count(size, holdout, f"samples of {source}")
    shuffled = SampleOrder(size, seed=0).indices(0, size)
    return np.sort(shuffled[:kept] if split == "train" else shuffled[kept:])


@runtime_checkable
class Augmented(Protocol):
    """The additions to `Dataset` of a data set with random transforms."""

    def drawn(
        self, indices: Indices, columns: Sequence[str], seed: int, epochs: NDArray[np.int64]
    ) -> dict[str, torch.Tensor]:
        """Return the same as `Dataset.batch` of the samples' `epochs` [len(indices)]. Equal arguments give equal
        batches."""
        ...


@runtime_checkable
class Blocked(Protocol):
    """The additions to `Dataset` of a data set that is read block by block."""

    @property
    def layout(self) -> Layout: ...


def sample_order(dataset: Dataset, seed: int, shuffle: bool = True) -> SampleOrder:
    """The order in which a run with this seed uses the samples. UserError for a negative seed."""
    layout = dataset.layout if isinstance(dataset, Blocked) else None
    return SampleOrder(len(dataset), seed, shuffle, layout=layout)


def evaluation_rows(dataset: Dataset, most: int) -> NDArray[np.int64]:
    """The samples of an evaluation, ascending: all, or `most` of them drawn at random, as files are often sorted by
    label; of data in blocks, drawn from few blocks. The same in every evaluation and for every seed of a job."""
    return np.sort(sample_order(dataset, 0).indices(0, min(most, len(dataset))))


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
    if (drawn := getattr(dataset, "drawn", None)) is not None:  # `isinstance` of a protocol takes as long as a batch
        return drawn(indices, columns, seed, np.full(len(indices), round_, dtype=np.int64))
    return dataset.batch(indices, columns)


if TYPE_CHECKING:
    import torch


class JoinedDataset:
    """The samples of one part after those of another, in the order of the parts."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        """UserError where there are none, or their columns differ."""
        self._parts = tuple(parts)
        self.columns = joined_columns({f"part {number}": part.columns for number, part in enumerate(parts)})
        self._starts = list(itertools.accumulate((len(part) for part in parts), initial=0))

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over those of the parts, in their order."""
        return hashlib.sha256("\n".join(part.fingerprint for part in self._parts).encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        parts = [self._sample(position, columns) for position in checked(indices, len(self)).tolist()]
        return joined(parts) if parts else self._parts[0].batch([], columns)

    def _sample(self, position: int, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        part = bisect.bisect_right(self._starts, position) - 1
        return self._parts[part].batch([position - self._starts[part]], columns)


def joined_columns(parts: Mapping[str, Mapping[str, ColumnSpec]]) -> dict[str, ColumnSpec]:
    """Join the holders' columns, each with its largest limit. UserError where they differ in more, or none is given."""
    if not parts:
        raise UserError("data of several holders: got none, expected one at least")
    found: dict[str, ColumnSpec] = {}
    first, columns = next(iter(parts.items()))
    for name, part in parts.items():
        if list(part) != list(columns):
            raise UserError(f"data: {name} has columns {', '.join(part)}, {first} has {', '.join(columns)}")
        for column, spec in part.items():
            known = found.setdefault(column, spec)
            if not known.fits(spec):
                raise UserError(f"data: column {column!r}: {name} has {spec}, {first} has {columns[column]}")
            if spec.limit is not None and known.limit is not None and spec.limit > known.limit:
                found[column] = spec
    return found
