"""The interface of data sets: columns of fixed shape, and samples of them on request, drawn anew in every epoch or
not.

Arrays that fit in memory: `.npz` files, and scikit-learn's bundled handwritten digits.

Arrays in numpy's format, of files that anybody wrote: a header may claim more than there is.
"""

from __future__ import annotations

import bisect
import hashlib
import importlib.util
import itertools
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.layout import Layout
from isthmus.data.order import SampleOrder
from isthmus.data.within import open_file
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


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Readers by version; the third version is for names of fields, which numbers have not."""


def read_npy(opened: BinaryIO, size_bytes: int) -> Array:
    """The array in the next `size_bytes`. ValueError for no array, and for a header that claims more."""
    begin = opened.tell()
    version = np.lib.format.read_magic(opened)
    if version not in _HEADERS:
        raise ValueError(f"got version {version} of numpy's format, expected 1.0 or 2.0")
    shape, _, dtype = _HEADERS[version](opened)
    claimed, there = math.prod(shape) * dtype.itemsize, size_bytes - (opened.tell() - begin)
    if claimed != there and not dtype.hasobject:  # numpy refuses objects below
        raise ValueError(f"its header claims {claimed} bytes, there are {there}")
    opened.seek(begin)
    return np.lib.format.read_array(opened, allow_pickle=False)


if TYPE_CHECKING:
    import torch

_DTYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
_DIGIT_SIDE = 8
MOST_DEFLATED = 1032  # bytes that one byte of a deflated member can become


class NpzOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arrays of an .npz file."""

    path: str  # An .npz file. Each array is a column; their first dimension is the sample.
    heldout_path: str | None = None  # Held-out samples; without it a share of `path`.
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05  # That share, drawn at random.


class DigitsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels."""

    flat: bool = False  # One vector per sample instead of an image.
    size: Annotated[int, Meta(ge=_DIGIT_SIDE)] = _DIGIT_SIDE  # Height and width in pixels.
    channels: Literal[1, 3] = 1  # Equal copies of the image.
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.1  # Share of the samples that training never sees.


class ArrayDataset:
    """Samples are the rows of arrays that share their first dim.

    Raises `UserError`, with `source` in front, for arrays that are empty, differ in length, or have a dtype that
    is no plain number.
    """

    def __init__(self, arrays: Mapping[str, Array], source: str, limits: Mapping[str, int] | None = None) -> None:
        if not arrays:
            raise UserError(f"{source}: holds no arrays")
        native: dict[str, Array] = {}
        for name, array in arrays.items():
            if array.dtype.name not in _DTYPES:
                raise UserError(
                    f"{source} column {name!r}: got dtype {array.dtype}, expected one of: {', '.join(sorted(_DTYPES))}"
                )
            if array.ndim == 0:
                raise UserError(f"{source} column {name!r}: got a scalar, expected one row per sample")
            native[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        lengths = {name: len(array) for name, array in native.items()}
        if len(set(lengths.values())) > 1:
            raise UserError(f"{source}: columns differ in length: {lengths}")
        if not any(lengths.values()):
            raise UserError(f"{source}: holds no samples")
        self._arrays = native
        self._limits = limits or {}

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return {
            name: ColumnSpec(dtype=array.dtype.name, shape=array.shape[1:], limit=self._limits.get(name))
            for name, array in self._arrays.items()
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint_of({"kind": "arrays", "columns": list(self._arrays)}, self._arrays.values())

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        check_columns(columns, self._arrays)
        positions = checked(indices, len(self))
        return as_tensors({name: self._arrays[name][positions] for name in columns})


def _share(arrays: Mapping[str, Array], holdout: float, split: Split, source: str) -> dict[str, Array]:
    rows = rows_of_split(len(next(iter(arrays.values()))), holdout, split, source)
    return {name: array[rows] for name, array in arrays.items()}


def load_npz(options: NpzOptions, split: Split) -> ArrayDataset:
    """The file's arrays as columns. Pickled content is refused. Raises `UserError` for what cannot be read."""
    separate = options.heldout_path is not None
    source = options.heldout_path if split == "heldout" and options.heldout_path is not None else options.path
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"npz option 'path': no file {source}")
    try:
        with open_file(path) as file:
            if not zipfile.is_zipfile(file):
                raise UserError(f"npz option 'path': {source} is no .npz archive")
            with zipfile.ZipFile(file) as archive:
                arrays = {one.filename.removesuffix(".npy"): _member(archive, one) for one in archive.infolist()}
    except UserError:
        raise
    except MemoryError:
        raise UserError(f"npz option 'path': cannot read {source}: there is not enough memory for its arrays") from None
    except Exception as error:  # numpy, zipfile and zlib raise families of their own
        raise UserError(f"npz option 'path': cannot read {source}: {error or type(error).__name__}") from error
    whole = ArrayDataset(arrays, source)
    if separate:
        return whole
    return ArrayDataset(_share(arrays, options.holdout, split, source), source)


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    if member.file_size > MOST_DEFLATED * (member.compress_size + 1):
        raise ValueError(f"{member.filename} claims {member.file_size} bytes, which {member.compress_size} cannot hold")
    with archive.open(member) as opened:
        return read_npy(cast("BinaryIO", opened), member.file_size)


def load_digits(options: DigitsOptions, split: Split) -> ArrayDataset:
    """1,797 digits: `pixel_values` float32 [channels, size, size] in 0 .. 1 (flat: one vector), `labels` int64.

    Larger sizes repeat the nearest pixel.
    """
    images, labels = _bundled_digits()
    pixels = images.astype(np.float32) / np.float32(16)
    nearest = np.arange(options.size) * _DIGIT_SIDE // options.size
    pixels = np.repeat(pixels[:, None, nearest[:, None], nearest], options.channels, axis=1)
    if options.flat:
        pixels = pixels.reshape(len(pixels), -1)
    arrays = {"pixel_values": pixels, "labels": labels.astype(np.int64)}
    return ArrayDataset(_share(arrays, options.holdout, split, "digits"), "digits", limits={"labels": 10})


def _bundled_digits() -> tuple[Array, Array]:
    """Images [digits, 8, 8] of 0 to 16, and labels [digits].

    Where scikit-learn's file is where it has always been, the library is not imported: that takes a second of a core,
    in every device's process and whenever one takes another's place.
    """
    found = importlib.util.find_spec("sklearn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if file is None or not file.is_file():
        bundled = import_extra("sklearn.datasets", "data of kind digits").load_digits()
        return bundled.images, bundled.target
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1].reshape(-1, _DIGIT_SIDE, _DIGIT_SIDE), rows[:, -1]
