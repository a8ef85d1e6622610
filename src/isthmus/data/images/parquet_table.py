"""The rows of Parquet files as one table: whole columns, or single cells out of the row groups that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.data.dataset import Array
from isthmus.data.digests import digests_of
from isthmus.data.within import opener
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra

KIND = "image-parquet"
MOST_KEPT_BYTES = 256 << 20
MOST_OPEN_FILES = 16


class _Group(msgspec.Struct, frozen=True):
    """Rows that Parquet reads together."""

    file: int
    number: int
    first: int  # row, counted over all files


class Table:
    """The rows of several files as one. Of images the row groups that were used last are kept, MOST_KEPT_BYTES."""

    def __init__(self, files: Sequence[Path]) -> None:
        """UserError for files that cannot be read."""
        self.files = files
        self._open = opener()
        self._parquet = import_extra("pyarrow.parquet", f"data of kind {KIND}")
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._groups: list[_Group] = []
        self.rows = 0
        for file in range(len(files)):
            metadata = self._file(file).metadata
            for number in range(metadata.num_row_groups):
                self._groups.append(_Group(file, number, self.rows))
                self.rows += metadata.row_group(number).num_rows
        self._firsts = np.array([group.first for group in self._groups], dtype=np.int64)

    @property
    def schema(self) -> Any:
        """pyarrow's, of the first file."""
        return self._file(0).schema_arrow

    def column(self, name: str) -> Any:
        """All rows of one, as pyarrow's array."""
        arrow = import_extra("pyarrow")
        parts: list[Any] = []
        for file, path in enumerate(self.files):
            reader = self._file(file)
            if name not in reader.schema_arrow.names:
                raise unknown_name(f"column of {path}", name, reader.schema_arrow.names)
            with _readable(path):
                parts += reader.read(columns=[name]).column(name).chunks
        return arrow.chunked_array(parts, type=self.schema.field(name).type)

    def cell(self, name: str, row: int) -> object:
        """The value of one row. UserError where its file cannot be read."""
        at = int(np.searchsorted(self._firsts, row, side="right")) - 1
        if at not in self._kept:
            self._read(name, at)
        self._kept.move_to_end(at)
        return self._kept[at][row - self._groups[at].first].as_py()

    def place(self, row: int) -> str:
        """The row's file, for messages."""
        return str(self.files[self._groups[int(np.searchsorted(self._firsts, row, side="right")) - 1].file])

    def _read(self, name: str, at: int) -> None:
        group = self._groups[at]
        with _readable(self.files[group.file]):
            found = self._file(group.file).read_row_group(group.number, columns=[name]).column(name)
        self._kept[at] = found
        while len(self._kept) > 1 and sum(column.nbytes for column in self._kept.values()) > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)

    def _file(self, file: int) -> Any:
        """pyarrow's reader, over a file that was opened within the folder."""
        if file not in self._opened:
            with _readable(self.files[file]):
                self._opened[file] = self._parquet.ParquetFile(self._open(self.files[file]))
            if len(self._opened) > MOST_OPEN_FILES:
                self._opened.popitem(last=False)[1].close(force=True)
        self._opened.move_to_end(file)
        return self._opened[file]

    def digests(self) -> Array:
        return digests_of(self.files, self._open)


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as e:
        raise UserError(f"{KIND}: cannot read {path}: {e.strerror or e}") from e
    except Exception as e:  # pyarrow raises many families for a damaged file
        raise UserError(f"{KIND}: cannot read {path}: {' '.join(str(e).split())}") from e
