"""Data sets of Hugging Face's library: saved to disk, of the hub by id, or a folder of Parquet, CSV or JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.arrow_numbers import check_nulls, number_type, numbers_of, spec_of
from isthmus.data.dataset import (
    Array,
    ColumnSpec,
    Dataset,
    Indices,
    Split,
    as_tensors,
    check_columns,
    checked,
    fingerprint_of,
    rows_of_split,
)
from isthmus.data.streams.dataset import StreamOptions, load_stream
from isthmus.data.text import TokenWindows, WindowOptions
from isthmus.data.within import check_within
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra
from isthmus.stores import hub_silence

if TYPE_CHECKING:
    import torch


HELD_OUT_NAMES = ("validation", "validation_matched", "test")


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A data set that the library `datasets` has saved."""

    path: str  # A directory that `datasets.save_to_disk` wrote: one data set, or several splits.
    columns: dict[str, str] = {}
    """The model's names of columns, each with the data set's name; without it every column of numbers is taken."""
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the rows that training never sees, where the directory has no split for it."""


class DiskDataset:
    """Rows of a table. A column's type is the declared one, its shape that of the first row. Raises UserError for
    columns that are not numbers of one shape, and for nulls."""

    def __init__(self, table: Any, rows: NDArray[np.int64], columns: Mapping[str, str], source: str) -> None:
        """`table` is a `datasets.Dataset`, which has no types."""
        self._table = table.with_format("numpy")
        self._arrow = table.with_format("arrow")
        self._rows = rows
        self._source = source
        self._fingerprint = str(getattr(table, "_fingerprint", ""))
        for name in columns.values():
            if name not in table.column_names:
                raise unknown_name(f"column of {source}", name, table.column_names)
        specs = {name: self._spec(name) for name in (columns.values() or table.column_names)}
        self._names = dict(columns) or {name: name for name, spec in specs.items() if spec is not None}
        self.columns: dict[str, ColumnSpec] = {}
        for ours, theirs in self._names.items():
            if (spec := specs[theirs]) is None:
                held = self._arrow[:1].schema.field(theirs).type
                raise UserError(f"{source} column {theirs!r}: got {held}, expected numbers")
            self.columns[ours] = spec

    def _spec(self, name: str) -> ColumnSpec | None:
        """None for a column without numbers. Images are decoded to them."""
        row = int(self._rows[0])
        first = self._arrow_rows(name, np.array([row]))
        if number_type(first.type) is not None:
            return spec_of(first, self._named(name), row)
        found = np.asarray(self._table[row][name])
        return ColumnSpec(dtype=found.dtype.name, shape=found.shape) if found.dtype.kind in "biuf" else None

    def _named(self, name: str) -> str:
        return f"{self._source} column {name!r}"

    def _arrow_rows(self, name: str, rows: NDArray[np.int64]) -> Any:
        """One of pyarrow's arrays."""
        column = self._arrow.select_columns([name])[rows].column(name).combine_chunks()
        return column.chunk(0) if hasattr(column, "chunk") else column

    @property
    def fingerprint(self) -> str:
        """Digests the rows and the fingerprint with which the data set was saved."""
        return fingerprint_of({"kind": "disk", "table": self._fingerprint, "columns": self._names}, [self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        check_columns(columns, self.columns)
        rows = self._rows[checked(indices, len(self))]
        return as_tensors({name: self._numbers(name, rows) for name in columns})

    def _numbers(self, name: str, rows: NDArray[np.int64]) -> Array:
        """[rows, *shape] of the model's column `name`."""
        theirs, spec = self._names[name], self.columns[name]
        found = self._arrow_rows(theirs, rows)
        if number_type(found.type) is not None:
            array = numbers_of(found, self._named(theirs), rows, scalars_as_declared=True)
        else:
            array = np.asarray(self._table.select_columns([theirs])[rows][theirs])
        if array.shape[1:] != spec.shape or array.dtype.name != spec.dtype:
            got = f"got {array.dtype} {list(array.shape[1:])}, expected {spec.dtype} {list(spec.shape)}"
            raise UserError(f"{self._named(theirs)}: rows differ in shape: {got} as the first row has")
        return array if array.flags.writeable else array.copy()

    def owners(self, column: str) -> NDArray[np.generic]:
        """(rows,) the column's values, which are texts or whole numbers."""
        if column not in self._table.column_names:
            raise unknown_name(f"column of {self._source}", column, self._table.column_names)
        check_nulls(self._arrow_rows(column, self._rows), self._named(column), self._rows)
        values = np.asarray(self._table.select_columns([column])[self._rows][column])
        if values.ndim != 1 or values.dtype.kind not in "iuUSO":
            raise UserError(f"column {column!r}: got {values.dtype}, expected texts or whole numbers")
        return values.astype(str) if values.dtype.kind == "O" else values


def saved_part(kind: str, path: Path, split: Split) -> tuple[Any, bool]:
    """Return the table of a split in a directory that `datasets` saved, and whether it is the whole split: else it is
    shared out. UserError for a directory that cannot be read, and for one without that split."""
    library = import_extra("datasets", "the data")
    check_within(path)
    try:
        found = library.load_from_disk(str(path))
    except Exception as e:  # the library and pyarrow raise many families for a malformed directory
        raise UserError(f"{kind} option 'path': cannot read {path}: {' '.join(str(e).split())}") from e
    if not isinstance(found, library.DatasetDict):
        return found, False
    if len(names := list(found)) == 1:  # whatever it is called
        return found[names[0]], False
    held = [name for name in HELD_OUT_NAMES if name in names]
    wanted = held[0] if split == "heldout" and held else "train"
    if wanted not in names:
        raise unknown_name(f"split of {path}", wanted, names)
    return found[wanted], bool(held)


def load_disk(options: DiskOptions, split: Split) -> DiskDataset:
    """The rows of `split`. UserError for a directory that cannot be read, an unknown column, or an empty split."""
    source, path = f"disk {options.path}", Path(options.path).expanduser()
    if not path.is_dir():
        raise UserError(f"disk option 'path': no directory {options.path}")
    table, whole = saved_part("disk", path, split)
    if not len(table):
        raise UserError(f"{source}: holds no samples")
    rows = np.arange(len(table), dtype=np.int64) if whole else rows_of_split(len(table), options.holdout, split, source)
    return DiskDataset(table, rows, options.columns, source)


HUB = "hub"


class HubOptions(WindowOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A data set of the Hugging Face hub, by id, or a folder of Parquet, CSV or JSON files."""

    path: str  # The id, as "wikitext", or a folder.
    name: str = ""  # One of the id's configurations: "wikitext-2-raw-v1".
    revision: str = ""  # A commit or tag of the id; without it the newest.
    train_split: str = "train"  # The split to train on.
    heldout_split: str = ""
    """The split to evaluate on; without it `validation` or `test` if there is one, else a share of `train_split`."""
    text: str = ""
    """The column of texts, for a language model: rows are joined, one per line, and cut into windows of tokens. Without
    it rows are samples."""
    columns: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Where rows are samples: the model's names of columns, each with the data set's name; without it every column of
    numbers is taken."""
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the rows that training never sees, where there is no split for it; when streaming, of the blocks."""
    streaming: bool = False
    """Read Parquet files or tar shards while the run goes on, and download no others: as the kind `stream`."""
    shuffle_blocks: Annotated[int, Meta(ge=1)] = 8  # When streaming, how many blocks are mixed, and held in memory.


def load_hub(options: HubOptions, split: Split) -> Dataset:
    """The rows of `split`, or their text. No code of the data set is run.

    Raises UserError for what cannot be found or read, an unknown split or column, or an empty split.
    """
    source = f"{HUB} {options.path}"
    if options.streaming:
        return load_stream(_as_stream(options, source), split)
    splits = _load(options)
    held = [name for name in ([options.heldout_split] if options.heldout_split else HELD_OUT_NAMES) if name in splits]
    if options.heldout_split and not held:
        raise unknown_name(f"split of {source}", options.heldout_split, list(splits))
    wanted = held[0] if held and split == "heldout" else options.train_split
    if wanted not in splits:
        raise unknown_name(f"split of {source}", wanted, list(splits))
    table = splits[wanted]
    if not len(table):
        raise UserError(f"{source}: split {wanted!r} holds no samples")
    rows = np.arange(len(table), dtype=np.int64) if held else rows_of_split(len(table), options.holdout, split, source)
    if not options.text:
        return DiskDataset(table, rows, options.columns, source)
    if options.columns:
        raise UserError(f"{source}: columns: got them beside text, expected one of the two")
    if options.text not in table.column_names:
        raise unknown_name(f"column of {source}", options.text, table.column_names)
    return TokenWindows(partial(_texts, table, rows, options.text, source), options, f"{source} {split}")


def _as_stream(options: HubOptions, source: str) -> StreamOptions:
    """Return the stream of the files that `datasets` finds for the splits; it reads none of them."""
    files = _load(options)
    held = [name for name in ([options.heldout_split] if options.heldout_split else HELD_OUT_NAMES) if name in files]
    for name in (options.train_split, *([options.heldout_split] if options.heldout_split else [])):
        if name not in files:
            raise unknown_name(f"split of {source}", name, list(files))
    return StreamOptions(
        path=files[options.train_split],
        heldout_path=files[held[0]] if held else None,
        holdout=options.holdout,
        text=options.text,
        columns=options.columns,
        shuffle_blocks=options.shuffle_blocks,
        sequence_length=options.sequence_length,
        tokenizer=options.tokenizer,
        shift_labels=options.shift_labels,
    )


def _load(options: HubOptions) -> dict[str, Any]:
    """The splits by name: tables, or when streaming the paths of their files."""
    library = import_extra("datasets", f"data of kind {HUB}")
    folder = Path(options.path).expanduser()
    if folder.is_dir():
        check_within(folder)
        if options.revision:
            raise UserError(f"{HUB} option 'revision': got one for a folder, expected none")
    elif options.path.startswith(("/", ".", "~")):
        raise UserError(f"{HUB} option 'path': no folder {options.path}")
    elif not (Path(library.config.HF_DATASETS_CACHE) / options.path.replace("/", "___")).exists() and (
        reason := hub_silence(options.path, "README.md", "dataset")
    ):
        where = f"no folder in {Path.cwd()}, nothing in the cache"
        raise UserError(f"{HUB} option 'path': cannot load {options.path}: {where}, and the hub {reason}")
    library.disable_progress_bars()
    asked = str(folder) if folder.is_dir() else options.path, options.name or None
    revision = options.revision or None
    try:
        if options.streaming:
            builder = library.load_dataset_builder(*asked, revision=revision)
            return {str(split): tuple(map(str, files)) for split, files in (builder.config.data_files or {}).items()}
        found = library.load_dataset(*asked, revision=revision)
    except Exception as e:  # no network, an unknown id, a script, malformed files: one family each
        raise UserError(f"{HUB} option 'path': cannot load {options.path}: {' '.join(str(e).split())}") from e
    return dict(found)


def _texts(table: Any, rows: Any, column: str, source: str) -> Iterable[bytes]:
    texts = table.select_columns([column])[rows][column]
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str):
            got = "null" if text is None else type(text).__name__
            raise UserError(f"{source} column {column!r}, row {row + 1}: got {got}, expected texts in every row")
    return [b"".join(f"{text.rstrip(chr(10))}\n".encode() for text in texts)]
