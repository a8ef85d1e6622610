"""Parquet files, read a row group at a time, of which the newest are open."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

from isthmus.data.arrow_numbers import number_type, numbers_of
from isthmus.data.dataset import Array
from isthmus.data.streams.files import HEAD_BYTES, KIND, Form, Shard, StreamFile, kept, readable
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra
from isthmus.reading import parse_json

MOST_OPEN_FILES = 16
_TAIL_BYTES = 8  # the footer's length and PAR1
_HEADER_BYTES = 64  # a page's header has less
_PAGES_BYTES = 1 << 10  # for headers of pages
_LENGTH_BYTES = 4  # before each text
_I32, _STRUCT = 5, 12
_SIZE_FIELD, _DICTIONARY_FIELD = 2, 7


class ParquetShards:
    sizes_are_bytes = True

    def __init__(self, files: Sequence[StreamFile], kind: str = KIND) -> None:
        """`kind` is that of the data, for messages."""
        self.files, self._kind = files, kind
        self._parquet = import_extra("pyarrow.parquet", f"data of kind {kind}")
        self._types = import_extra("pyarrow.types")
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._groups: dict[int, list[int]] = {}  # the row groups that hold rows, of opened files

    def shard(self, file: int, text: str) -> Shard:
        found = self.files[file]
        if found.is_remote:
            return kept(found, f"parquet sizes {text}", Shard, lambda: self._shard(file, text))
        return self._shard(file, text)

    def _shard(self, file: int, text: str) -> Shard:
        # Not one of the opened readers: several threads look into files at once.
        with readable(self.files[file].url), self.files[file].open() as opened:
            metadata = self._parquet.ParquetFile(opened).metadata
            groups = [metadata.row_group(number) for number in _filled(metadata)]
            url = self.files[file].url
            sizes = tuple(_text_size(opened, group, text, url) for group in groups) if text else ()
        return Shard(
            blocks=tuple(group.num_rows for group in groups),
            text_sizes=sizes,
            digest=_digest(self.files[file]),
        )

    @property
    def schema(self) -> Any:
        """pyarrow's, of the first file."""
        return self._file(0).schema_arrow

    def groups(self, file: int) -> list[int]:
        """Return the rows of each row group that holds some."""
        metadata = self._file(file).metadata
        return [metadata.row_group(number).num_rows for number in self._groups[file]]

    def columns(self) -> dict[str, Form]:
        return {field.name: self._form(field.type) for field in self.schema}

    def _form(self, held: Any) -> Form:
        types = self._types
        if types.is_string(held) or types.is_large_string(held):
            return "text"
        if (types.is_struct(held) and held.get_field_index("bytes") >= 0) or types.is_binary(held):
            return "image"
        return "other" if number_type(held) is None else "numbers"

    def classes(self, name: str) -> int | None:
        return declared_classes(self.schema, name) or None

    def numbers(self, file: int, block: int, name: str) -> Array:
        named = f"{KIND} {self.files[file].url} column {name!r}"
        values = self._column(file, block, name)
        return numbers_of(values, named, self._rows(file, block))

    def contents(self, file: int, block: int, name: str) -> list[bytes]:
        found: list[object] = self._column(file, block, name).to_pylist()
        named = f"{KIND} {self.files[file].url} column {name!r}"
        return [_as_bytes(cell, named, row) for cell, row in zip(found, self._rows(file, block), strict=True)]

    def _rows(self, file: int, block: int) -> range:
        """Numbers of a block's rows in the file, from 0."""
        metadata, group = self._file(file).metadata, self._groups[file][block]
        first = sum(metadata.row_group(number).num_rows for number in range(group))
        return range(first, first + metadata.row_group(group).num_rows)

    def _column(self, file: int, block: int, name: str) -> Any:
        """Return a column of a row group as one array of pyarrow's."""
        one = self.chunks(file, block, name).combine_chunks()
        return one.chunk(0) if hasattr(one, "chunk") else one

    def chunks(self, file: int, block: int, name: str) -> Any:
        """The same as pyarrow's chunked array. UserError where it is not there or cannot be read."""
        reader = self._file(file)
        if name not in reader.schema_arrow.names:
            raise unknown_name(f"column of {self.files[file].url}", name, reader.schema_arrow.names)
        with readable(self.files[file].url, self._kind):
            group = self._groups[file][block]
            return reader.read_row_group(group, columns=[name], use_threads=False).column(name)

    def _file(self, file: int) -> Any:
        """pyarrow's reader."""
        if file not in self._opened:
            with readable(self.files[file].url, self._kind):
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


def _text_size(opened: BinaryIO, group: Any, column: str, url: str) -> int:
    """About how many bytes a row group's texts and their line ends have, repeated texts counted each time."""
    chunks = {c.path_in_schema: c for c in (group.column(number) for number in range(group.num_columns))}
    if column not in chunks:
        raise unknown_name(f"column of {url}", column, chunks)
    chunk = chunks[column]
    rows, size = chunk.num_values, chunk.total_uncompressed_size
    found = size - _LENGTH_BYTES * rows
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        opened.seek(chunk.dictionary_page_offset)
        dictionary = _dictionary(opened.read(_HEADER_BYTES))
        if dictionary is not None and dictionary.texts:
            texts = dictionary.size_bytes - _LENGTH_BYTES * dictionary.texts
            places = rows * (dictionary.texts - 1).bit_length() / 8
            rest = size - dictionary.size_bytes
            # More than places of texts: where a dictionary grows too large, the other rows are written as they are.
            plain = rest > 2 * places + _PAGES_BYTES + rows // 8
            found = texts + rest if plain else round(texts * rows / dictionary.texts)
    return max(1, found + rows)


class _Dictionary(NamedTuple):
    texts: int
    size_bytes: int


def _dictionary(header: bytes) -> _Dictionary | None:
    """Return the dictionary that the page's header announces, a struct in Thrift's compact protocol: field 2 is its
    size, field 7 a struct whose field 1 is how many values it has. None for anything else."""
    at, size, field = 0, -1, 0
    try:
        while header[at]:
            field, kind, at = field + (header[at] >> 4), header[at] & 15, at + 1
            if kind == _STRUCT and field == _DICTIONARY_FIELD:
                at, field = at, 0
                return _Dictionary(_varint(header, at + 1)[0], size) if header[at] == 1 << 4 | _I32 else None
            if kind != _I32:
                return None
            number, at = _varint(header, at)
            size = number if field == _SIZE_FIELD else size
    except IndexError:  # it is longer than what was read
        pass
    return None


def _varint(header: bytes, at: int) -> tuple[int, int]:
    """A number, zigzag, and where the next begins."""
    number = shift = 0
    while header[at] & 128:
        number |= (header[at] & 127) << shift
        shift, at = shift + 7, at + 1
    number |= header[at] << shift
    return number >> 1, at + 1


def _as_bytes(cell: object, named: str, row: int) -> bytes:
    if isinstance(cell, dict):
        cell = cell.get("bytes")
    if isinstance(cell, str):
        return cell.encode()
    if isinstance(cell, bytes):
        return cell
    got = "null" if cell is None else type(cell).__name__
    raise UserError(f"{named}, row {row + 1}: got {got}, expected texts or encoded images")


def _digest(file: StreamFile) -> str:
    with readable(file.url), file.open() as opened:
        digest = hashlib.sha256(opened.read(HEAD_BYTES))
        end = opened.seek(-_TAIL_BYTES, 2)
        length = int.from_bytes(opened.read(4), "little")
        opened.seek(end - length)
        digest.update(opened.read(length))
        return digest.hexdigest()


def declared_classes(schema: Any, label: str) -> int:
    """Return the number of classes as Hugging Face's `datasets` writes it beside the columns; 0 where it did not."""
    written: bytes = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        found: Any = parse_json(written, object, "")
        return len(found["info"]["features"][label]["names"])
    except (UserError, KeyError, TypeError):
        return 0
