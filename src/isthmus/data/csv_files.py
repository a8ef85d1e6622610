"""CSV files with a header: columns of numbers, vectors of several columns, and names of classes."""

from __future__ import annotations

import csv
import fnmatch
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.dataset import Array, ArrayDataset, ColumnSpec, Indices, Split, rows_of_split
from isthmus.data.within import check_within, open_file
from isthmus.errors import UserError, unknown_name

if TYPE_CHECKING:
    import torch

KIND = "csv"
Names = str | tuple[str, ...]


class CsvOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CSV file whose first line names its columns, or a folder of such files."""

    path: str  # A file, or a folder whose files *.csv have the same columns: read in the order of their names.
    columns: dict[str, Names] = {}
    """The model's names of columns, each with the file's name, or with a list of names, which become one vector of
    float32; in a list, `x*` stands for all that begin with x. Without it every column of numbers is taken."""
    classes: tuple[str, ...] = ()  # Names of all classes, in the order of their numbers, for a column of texts.
    delimiter: Annotated[str, Meta(min_length=1, max_length=1)] = ","  # Between values.
    heldout_path: str | None = None  # Held-out samples; without it a share of `path`.
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05  # That share, drawn at random.


class CsvDataset:
    """The rows of a table of texts, as numbers. UserError for what are none, with file, line and column."""

    def __init__(
        self,
        table: Mapping[str, Sequence[str]],
        lines: Sequence[str],
        options: CsvOptions,
        source: str,
        rows: NDArray[np.int64] | None = None,
    ):
        """`table` is by column, [rows]; `lines` say where each row was. With `rows` those alone: the whole table says
        of which type a column is, so that both splits of a file agree."""
        self._table, self._lines, self._source = table, lines, source
        arrays: dict[str, Array] = {}
        limits: dict[str, int] = {}
        for ours, theirs in self._wanted(options.columns).items():
            if isinstance(theirs, str):
                arrays[ours] = self._column(theirs, options.classes)
                if options.classes and self._texts(theirs):
                    limits[ours] = len(options.classes)
            else:
                parts = [self._numbers(name) for name in self._matched(theirs)]
                arrays[ours] = np.stack(parts, axis=1).astype(np.float32)
        if not arrays:
            raise UserError(f"{source}: has no column of numbers, it has: {', '.join(table)}")
        if rows is not None:
            arrays = {name: array[rows] for name, array in arrays.items()}
            here: list[int] = rows.tolist()
            self._lines = [lines[row] for row in here]
            self._table = {name: [values[row] for row in here] for name, values in table.items()}
        self._arrays = ArrayDataset(arrays, source, limits)

    def _wanted(self, columns: Mapping[str, Names]) -> Mapping[str, Names]:
        return columns or {name: name for name in self._table if not self._texts(name)}

    def _matched(self, names: Sequence[str]) -> list[str]:
        """In the file's order for each pattern."""
        found: list[str] = []
        if not names:
            raise UserError(f"{self._source}: option columns: got an empty list, expected names of columns")
        for name in names:
            these = [name] if name in self._table else [one for one in self._table if fnmatch.fnmatchcase(one, name)]
            if not these:
                raise unknown_name(f"column of {self._source}", name, self._table)
            found += these
        return found

    def _texts(self, name: str) -> bool:
        """Return whether the column's first value is no number."""
        if name not in self._table:
            raise unknown_name(f"column of {self._source}", name, self._table)
        try:
            float(self._table[name][0])
        except ValueError:
            return True
        return False

    def _column(self, name: str, classes: Sequence[str]) -> Array:
        if self._texts(name) and classes:
            numbers = {one: number for number, one in enumerate(classes)}
            for line, text in zip(self._lines, self._table[name], strict=True):
                if text not in numbers:
                    raise UserError(f"{line}, column {name!r}: got {text!r}, expected one of: {', '.join(classes)}")
            return np.array([numbers[text] for text in self._table[name]], dtype=np.int64)
        found, values = self._numbers(name), self._table[name]
        return np.array([int(text) for text in values], dtype=np.int64) if _are_whole(values) else found

    def _numbers(self, name: str) -> NDArray[np.float32]:
        values = np.empty(len(self._lines), dtype=np.float32)
        for row, (line, text) in enumerate(zip(self._lines, self._table[name], strict=True)):
            try:
                values[row] = float(text)
            except ValueError:
                hint = "" if text.strip() else ": it is empty"
                raise UserError(
                    f"{line}, column {name!r}: got {text!r}, expected a number{hint} (or the option classes, with the "
                    "names of all classes)"
                ) from None
            if not np.isfinite(values[row]):
                raise UserError(f"{line}, column {name!r}: got {text!r}, expected a finite number")
        return values

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._arrays.columns

    @property
    def fingerprint(self) -> str:
        return self._arrays.fingerprint

    def __len__(self) -> int:
        return len(self._lines)

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        return self._arrays.batch(indices, columns)

    def owners(self, column: str) -> NDArray[np.generic]:
        """(rows,) the column's values: numbers, where all are whole, or texts."""
        if column not in self._table:
            raise unknown_name(f"column of {self._source}", column, self._table)
        values = self._table[column]
        return np.array([int(text) for text in values] if _are_whole(values) else values)


def load_csv(options: CsvOptions, split: Split) -> CsvDataset:
    """The rows of `split`. UserError for files that are missing or damaged, and for values that are no numbers."""
    held = options.heldout_path if split == "heldout" else None
    source = f"{KIND} {held or options.path}"
    table, lines = _read(held or options.path, options, source)
    rows = rows_of_split(len(lines), options.holdout, split, source) if options.heldout_path is None else None
    return CsvDataset(table, lines, options, source, rows)


def _read(path: str, options: CsvOptions, source: str) -> tuple[dict[str, list[str]], list[str]]:
    place = Path(path).expanduser()
    if place.is_dir():
        check_within(place)
        files = sorted(place.glob("*.csv"))
        if not files:
            raise UserError(f"{source}: the folder holds no file *.csv")
    elif place.is_file():
        files = [place]
    else:
        raise UserError(f"{source}: no such file or folder")
    table: dict[str, list[str]] = {}
    lines: list[str] = []
    for file in files:
        names, rows = _rows(file, options.delimiter)
        if table and list(table) != names:
            raise UserError(f"{file}: has the columns {', '.join(names)}, {files[0].name} has {', '.join(table)}")
        table = table or {name: [] for name in names}
        for number, row in rows:
            for name, value in zip(names, row, strict=True):
                table[name].append(value)
            lines.append(f"{file}, line {number}")
    if not lines:
        raise UserError(f"{source}: holds no samples")
    return table, lines


def _are_whole(values: Sequence[str]) -> bool:
    """Return whether all are whole numbers of 64 bits, as they are written."""
    return all(re.fullmatch(r"\s*[+-]?\d+\s*", text) and len(text) < 19 for text in values)


def _rows(file: Path, delimiter: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns, and each row with its line's number."""
    try:
        with open_file(file) as opened:
            text = opened.read().decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = next(reader, [])
        rows = [(reader.line_num, row) for row in reader if row]
    except OSError as e:
        raise UserError(f"{file}: cannot be read: {e.strerror or e}") from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise UserError(f"{file}: is no CSV file in UTF-8: {e}") from e
    if not names:
        raise UserError(f"{file}: is empty, expected a first line with the names of the columns")
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise UserError(f"{file}: names the column {twice!r} twice")
    for number, row in rows:
        if len(row) != len(names):
            raise UserError(f"{file}, line {number}: got {len(row)} values, expected {len(names)}")
    return names, rows
