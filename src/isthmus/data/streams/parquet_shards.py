"""Parquet files as shards: a block is a row group, the index is the file's own footer. Only columns that are asked for
are read."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from isthmus.data.dataset import Array
from isthmus.data.images.parquet import declared_classes
from isthmus.data.streams.files import KIND, StreamFile, readable
from isthmus.data.streams.shards import HEAD_BYTES, Form, Shard, as_numbers, kept
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra

MOST_OPEN_FILES = 8
_TAIL_BYTES = 8
"""The footer's length and PAR1."""


class ParquetShards:
    def __init__(self, files: Sequence[StreamFile]) -> None:
        self.files = files
        self._parquet = import_extra("pyarrow.parquet", f"data of kind {KIND}")
        self._types = import_extra("pyarrow.types")
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._groups: dict[int, list[int]] = {}
        """Of opened files, the row groups that hold rows."""

    def shard(self, file: int, text: str) -> Shard:
        found = self.files[file]
        if found.is_remote:
            return kept(found, f"parquet {text}", Shard, lambda: self._shard(file, text))
        return self._shard(file, text)

    def _shard(self, file: int, text: str) -> Shard:
        # Not one of the opened readers: several threads look into files at once.
        with readable(self.files[file].url), self.files[file].open() as opened:
            metadata = self._parquet.ParquetFile(opened).metadata
        groups = [metadata.row_group(number) for number in _filled(metadata)]
        return Shard(
            blocks=tuple(group.num_rows for group in groups),
            text_sizes=tuple(_text_size(group, text, self.files[file].url) for group in groups) if text else (),
            digest=_digest(self.files[file]),
        )

    def columns(self) -> dict[str, Form]:
        return {field.name: self._form(field.type) for field in self._file(0).schema_arrow}

    def _form(self, held: Any) -> Form:
        types = self._types
        if types.is_string(held) or types.is_large_string(held):
            return "text"
        if (types.is_struct(held) and held.get_field_index("bytes") >= 0) or types.is_binary(held):
            return "image"
        while (inner := _inner(held)) is not None:
            held = inner
        numbers = types.is_integer(held) or types.is_floating(held) or types.is_boolean(held)
        return "numbers" if numbers else "other"

    def classes(self, name: str) -> int | None:
        return declared_classes(self._file(0).schema_arrow, name) or None

    def numbers(self, file: int, block: int, name: str) -> Array:
        values: Any = self._column(file, block, name)
        shape = [len(values)]
        while (inner := _inner(values.type)) is not None:
            values = getattr(values, "storage", values)  # Hugging Face's Array2D and others
            if values.type == inner:
                continue
            lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
            if values.null_count or len(lengths) != 1:
                raise UserError(f"{KIND} {self.files[file].url} column {name!r}: rows differ in shape")
            shape.append(int(lengths[0]))
            values = values.flatten()
        if values.null_count:
            raise UserError(f"{KIND} {self.files[file].url} column {name!r}: a row holds no number")
        found = values.to_numpy(zero_copy_only=False)
        if found.dtype.kind not in "biuf" or len(found) != math.prod(shape):
            raise UserError(f"{KIND} {self.files[file].url} column {name!r}: got {values.type}, expected numbers")
        return as_numbers(found.reshape(shape))

    def contents(self, file: int, block: int, name: str) -> list[bytes]:
        found: list[object] = self._column(file, block, name).to_pylist()
        return [_as_bytes(cell, self.files[file].url, name) for cell in found]

    def _column(self, file: int, block: int, name: str) -> Any:
        """As one array of pyarrow's."""
        reader = self._file(file)
        if name not in reader.schema_arrow.names:
            raise unknown_name(f"column of {self.files[file].url}", name, reader.schema_arrow.names)
        with readable(self.files[file].url):
            group = self._groups[file][block]
            column = reader.read_row_group(group, columns=[name], use_threads=False).column(name)
            one = column.combine_chunks()
            return one.chunk(0) if hasattr(one, "chunk") else one

    def _file(self, file: int) -> Any:
        """pyarrow's reader."""
        if file not in self._opened:
            with readable(self.files[file].url):
                reader = self._parquet.ParquetFile(self.files[file].open())
                self._groups[file] = _filled(reader.metadata)
                self._opened[file] = reader
            if len(self._opened) > MOST_OPEN_FILES:
                oldest, reader = self._opened.popitem(last=False)
                del self._groups[oldest]
                reader.close(force=True)
        self._opened.move_to_end(file)
        return self._opened[file]


def _filled(metadata: Any) -> list[int]:
    """The row groups that hold rows."""
    return [number for number in range(metadata.num_row_groups) if metadata.row_group(number).num_rows]


def _text_size(group: Any, column: str, url: str) -> int:
    sizes = {
        chunk.path_in_schema: chunk.total_uncompressed_size
        for chunk in (group.column(number) for number in range(group.num_columns))
    }
    if column not in sizes:
        raise unknown_name(f"column of {url}", column, sizes)
    return max(1, sizes[column])


def _inner(held: Any) -> Any:
    """What a type's values consist of: of a list its elements, of an extension its storage; None of all others."""
    types = import_extra("pyarrow.types")
    if types.is_list(held) or types.is_large_list(held) or types.is_fixed_size_list(held):
        return held.value_type
    return getattr(held, "storage_type", None)


def _as_bytes(cell: object, url: str, name: str) -> bytes:
    if isinstance(cell, dict):
        cell = cell.get("bytes")
    if isinstance(cell, str):
        return cell.encode()
    if isinstance(cell, bytes):
        return cell
    raise UserError(f"{KIND} {url} column {name!r}: got {type(cell).__name__}, expected texts or encoded images")


def _digest(file: StreamFile) -> str:
    with readable(file.url), file.open() as opened:
        digest = hashlib.sha256(opened.read(HEAD_BYTES))
        end = opened.seek(-_TAIL_BYTES, 2)
        length = int.from_bytes(opened.read(4), "little")
        opened.seek(end - length)
        digest.update(opened.read(length))
        return digest.hexdigest()
