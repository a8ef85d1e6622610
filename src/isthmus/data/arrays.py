"""Arrays that fit in memory: `.npz` files, and scikit-learn's bundled handwritten digits.

Arrays in numpy's format, of files that anybody wrote: a header may claim more than there is.
"""

from __future__ import annotations

import importlib.util
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta

from isthmus.data.dataset import (
    Array,
    ColumnSpec,
    Indices,
    Split,
    as_tensors,
    check_columns,
    checked,
    fingerprint_of,
    rows_of_split,
)
from isthmus.data.within import open_file
from isthmus.errors import UserError
from isthmus.extensions import import_extra

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
