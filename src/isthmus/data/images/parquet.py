"""Encoded images in Parquet files, as Hugging Face's hub has them: bytes, or {bytes, path}, beside a label."""

from __future__ import annotations

import glob
import io
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import Array, Split, rows_of_split
from isthmus.data.digests import digests_of
from isthmus.data.images.dataset import ImageDataset, ImageOptions
from isthmus.data.images.folder import HELD_OUT_NAMES, TRAIN, the_held_out
from isthmus.data.streams.files import StreamFile
from isthmus.data.streams.parquet_shards import ParquetShards, declared_classes
from isthmus.data.within import opener
from isthmus.errors import StepError, UserError, unknown_name
from isthmus.extensions import import_extra

KIND = "image-parquet"
MOST_KEPT_BYTES = 256 << 20


class Table(ParquetShards):
    """The rows of several files as one. Of images the row groups that were used last are kept, MOST_KEPT_BYTES."""

    def __init__(self, files: Sequence[Path]) -> None:
        """UserError for files that cannot be read."""
        self._open = opener()
        super().__init__([StreamFile(str(file), self._open) for file in files], KIND)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        groups = [(file, number, rows) for file in range(len(files)) for number, rows in enumerate(self.groups(file))]
        self._places = [(file, number) for file, number, _ in groups]
        self._ends = np.cumsum([rows for _, _, rows in groups], dtype=np.int64)
        self.rows = int(self._ends[-1]) if groups else 0

    def column(self, name: str) -> Any:
        """All rows of one, as pyarrow's array."""
        parts = [chunk for place in self._places for chunk in self.chunks(*place, name).chunks]
        return import_extra("pyarrow").chunked_array(parts, type=self.schema.field(name).type)

    def cell(self, name: str, row: int) -> object:
        """The value of one row. UserError where its file cannot be read."""
        at = self._group(row)
        if at not in self._kept:
            self._kept[at] = self.chunks(*self._places[at], name)
            while len(self._kept) > 1 and sum(column.nbytes for column in self._kept.values()) > MOST_KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(at)
        held = self._kept[at]
        return held[row - int(self._ends[at]) + len(held)].as_py()

    def place(self, row: int) -> str:
        """The row's file, for messages."""
        return self.files[self._places[self._group(row)][0]].url

    def _group(self, row: int) -> int:
        return int(np.searchsorted(self._ends, row, side="right"))

    def digests(self) -> Array:
        return digests_of([Path(file.url) for file in self.files], self._open)


MOST_LABEL = (1 << 31) - 1  # a model has an output for each class: labels beyond this are something else


class ImageParquetOptions(ImageOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images in a column of Parquet files."""

    path: str  # A file, a glob, or a folder of `*.parquet`.
    heldout_path: str | None = None
    """Held-out files; without it those called `validation-...` (or valid, val, test), else a share of the rows."""
    image: str = "image"  # The column of images: bytes, or {bytes, path}.
    label: str = "label"  # The column of labels: whole numbers, fractions or texts.
    classes: tuple[str, ...] = ()
    """Names of all classes, in the order of their numbers; without it labels that are texts, sorted."""


class ParquetImages:
    """Some rows of a table."""

    def __init__(self, table: Table, rows: NDArray[np.int64], options: ImageParquetOptions) -> None:
        """UserError for columns that are not there, or hold neither images nor labels."""
        self._table = table
        self._rows = rows
        self._column = options.image
        _check_images(table, options.image)
        values, self.classes = _labels(table, options)
        self.labels = values[rows]

    def name(self, sample: int) -> str:
        row = int(self._rows[sample])
        return f"{self._table.place(row)} row {row + 1}"

    def open(self, sample: int) -> BinaryIO:
        found = self._table.cell(self._column, int(self._rows[sample]))
        if isinstance(found, dict):
            found = cast("dict[str, object]", found).get("bytes")
        if not isinstance(found, bytes):
            raise StepError(f"{KIND} {self.name(sample)} (sample {sample})", "holds no image, expected its bytes")
        return io.BytesIO(found)

    def contents(self) -> Iterable[Array]:
        return [self._table.digests(), self._rows]

    def owners(self, column: str) -> NDArray[np.generic]:
        """(samples,) a column's values. UserError for one that is not there."""
        values = _without_dictionary(self._table.column(column))
        kinds = import_extra("pyarrow.types")
        if not (kinds.is_integer(values.type) or _is_text(values.type)) or values.null_count:
            raise UserError(f"column {column!r}: got {values.type}, expected texts or whole numbers")
        return np.asarray(values.to_pylist())[self._rows]


def load_image_parquet(options: ImageParquetOptions, split: Split) -> ImageDataset:
    """UserError for files that are missing or cannot be read, and for columns that are not as the options say."""
    separate = options.heldout_path is not None
    source = options.heldout_path if split == "heldout" and options.heldout_path is not None else options.path
    files, divided = _files(source, split)
    table = Table(files)
    if not table.rows:
        raise UserError(f"{KIND} {source}: holds no samples")
    whole = separate or divided
    rows = np.arange(table.rows) if whole else rows_of_split(table.rows, options.holdout, split, f"{KIND} {source}")
    return ImageDataset(ParquetImages(table, rows, options), options, split, KIND)


def _files(source: str, split: Split) -> tuple[list[Path], bool]:
    """In the order of their names, and whether those of the split only."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(path.rglob("*.parquet"))
        train = [file for file in found if file.name.startswith(TRAIN)]
        held_out: dict[str, list[Path]] = {}
        for file in found if train else ():
            name = next((name for name in HELD_OUT_NAMES if file.name.startswith(name)), None)
            if name is not None:
                held_out.setdefault(name, []).append(file)
        if held_out:
            return (the_held_out(KIND, path, held_out) if split == "heldout" else train), True
        found = train or found
    else:
        found = [path] if path.is_file() else sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not found:
        raise UserError(f"{KIND} option 'path': no file matches {source!r}, expected a file, a glob or a folder")
    return found, False


def _check_images(table: Table, name: str) -> None:
    if name not in table.schema.names:
        raise unknown_name(f"column of {table.files[0].url}", name, table.schema.names)
    kinds = import_extra("pyarrow.types")
    held = table.schema.field(name).type
    encoded = held
    if kinds.is_struct(held) and held.get_field_index("bytes") >= 0:
        encoded = held.field("bytes").type
    if not (kinds.is_binary(encoded) or kinds.is_large_binary(encoded) or kinds.is_binary_view(encoded)):
        raise UserError(f"{KIND} column {name!r}: got {held}, expected bytes or a struct with 'bytes'")


def _labels(table: Table, options: ImageParquetOptions) -> tuple[Array, int | None]:
    """Return the labels of all rows, and how many classes there are."""
    column = _without_dictionary(table.column(options.label))
    named = f"{KIND} column {options.label!r}"
    if column.null_count:
        row = next(number for number, value in enumerate(column, start=1) if not value.is_valid)
        raise UserError(f"{named}: row {row} has no label")
    kinds = import_extra("pyarrow.types")
    if _is_text(column.type):
        texts = np.asarray(column.to_pylist(), dtype=object)
        names = list(options.classes) or sorted(set(texts))
        number_of = {name: number for number, name in enumerate(names)}
        for text in sorted(set(texts)):
            if text not in number_of:
                raise unknown_name(f"class of {table.files[0].url}", text, names)
        return np.array([number_of[text] for text in texts], dtype=np.int64), len(names)
    if kinds.is_floating(column.type):
        return _fractions(column.to_numpy(), named, options), None
    if not (kinds.is_integer(column.type) or kinds.is_boolean(column.type)):
        raise UserError(f"{named}: got {column.type}, expected numbers or texts")
    return _numbers(column.to_numpy(), named, options, declared_classes(table.schema, options.label))


def _fractions(values: Array, named: str, options: ImageParquetOptions) -> Array:
    if options.classes:
        raise UserError(f"{KIND} option 'classes': got {len(options.classes)} names, but {named} holds fractions")
    with np.errstate(over="ignore"):
        labels = values.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(labels))
    if wrong.size:
        raise UserError(f"{named}: row {wrong[0] + 1}: got {values[wrong[0]]}, expected a finite number (float32)")
    return labels


def _numbers(values: Array, named: str, options: ImageParquetOptions, declared: int) -> tuple[Array, int]:
    least, most = int(values.min()), int(values.max())
    if least < 0:
        raise UserError(f"{named}: got {least}, expected labels from 0 on")
    last = len(options.classes) - 1 if options.classes else MOST_LABEL
    if most > last:
        why = f"option 'classes' has {last + 1} names" if options.classes else "numbers of classes"
        raise UserError(f"{named}: got {most}, expected labels of 0 to {last} ({why})")
    return values.astype(np.int64), len(options.classes) or max(most + 1, declared)


def _without_dictionary(column: Any) -> Any:
    """Pandas' categories are written as numbers beside a dictionary."""
    kinds = import_extra("pyarrow.types")
    return column.cast(column.type.value_type) if kinds.is_dictionary(column.type) else column


def _is_text(held: Any) -> bool:
    kinds = import_extra("pyarrow.types")
    return kinds.is_string(held) or kinds.is_large_string(held) or kinds.is_string_view(held)
