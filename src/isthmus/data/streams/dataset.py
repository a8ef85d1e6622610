"""A data set that is read block by block while a run goes on. Before the first step only the index of each file is
read, and one block of each column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

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
from isthmus.data.images.decoding import Mode, PixelOptions
from isthmus.data.images.pipeline import Table, read_pipeline
from isthmus.data.layout import Layout, layout_of
from isthmus.data.streams.columns import BlockRows, Images, Numbers, StreamBlock, StreamColumn, TokenColumn, TokenRings
from isthmus.data.streams.files import KIND, TAR, Shard, Shards, StreamFile, ending_of, stream_file, stream_files
from isthmus.data.streams.tar_shards import TarShards, listed_shards
from isthmus.data.text import WindowOptions
from isthmus.data.tokenizer import load_tokenizer
from isthmus.errors import UserError, unknown_name

if TYPE_CHECKING:
    import torch
import hashlib
from collections import OrderedDict
from typing import Any, BinaryIO, NamedTuple

from isthmus.data.arrow_numbers import number_type, numbers_of
from isthmus.data.images.parquet import declared_classes
from isthmus.data.streams.files import HEAD_BYTES, Form, kept, readable
from isthmus.extensions import import_extra

_AT_ONCE = 16  # files behind a URL that are looked into at once: each takes a few round trips
Paths = str | tuple[str, ...]


class StreamOptions(WindowOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parquet files or tar shards of any size, read while the run goes on."""

    path: Paths
    """Files, globs, folders or URLs (`s3://`, `gs://`, `hf://`, `https://`, ...); `{000..099}` names a hundred."""
    heldout_path: Paths | None = None  # Those of held-out samples; without it a share of the blocks.
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05  # That share, drawn at random.
    index: str = ""
    """For tar shards: a JSON file of `widsindex create`, which says how many samples each has; without it the headers
    of all shards are looked through before the first step."""
    text: str = ""
    """The column of texts, for a language model: they are joined, one per line, and cut into windows of tokens. Without
    it rows are samples."""
    columns: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Where rows are samples: the model's names of columns, each with the files' name, which in tar shards is the
    ending; without it every column of numbers is taken."""
    shuffle_blocks: Annotated[int, Meta(ge=1)] = 8
    """Blocks (row groups of Parquet, up to 256 samples of a tar shard) whose samples are mixed, and held in memory."""
    mode: Mode = "RGB"  # The mode that every image is converted to; the names are Pillow's.
    transforms: tuple[Table, ...] = ()
    """Tables with the `name` of a transform of torchvision.transforms.v2 and its arguments, in order."""
    heldout_transforms: tuple[Table, ...] | None = None
    """For held-out images; without it the same, with random crops made central and flips left out."""


class StreamDataset:
    """Columns are numbers, images or windows of tokens.

    The fingerprint is of each file's index (the footer of a Parquet file, the headers of a tar file) and its first 64
    KiB, of which blocks the split has, and of the settings: to read all samples for it would take as long as an epoch.
    """

    def __init__(
        self, columns: Mapping[str, StreamColumn], blocks: Sequence[StreamBlock], window: int, identity: str
    ) -> None:
        self._columns = columns
        self._blocks = blocks
        self._window = window
        self._identity = identity
        self._ends = np.array([block.first + block.samples for block in blocks], dtype=np.int64)
        self._specs: dict[str, ColumnSpec] = {}

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return {name: self._spec(name) for name in self._columns}

    def _spec(self, name: str) -> ColumnSpec:
        """A column that nobody asks for is not read for it."""
        if name not in self._specs:
            self._specs[name] = self._columns[name].spec
        return self._specs[name]

    @property
    def fingerprint(self) -> str:
        return self._identity

    @cached_property
    def layout(self) -> Layout:
        """The blocks, for an order that reads them one after another."""
        return layout_of((block.samples for block in self._blocks), self._window)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return samples as they are in epoch 0 with seed 0."""
        return self.drawn(indices, columns, 0, np.zeros(len(indices), dtype=np.int64))

    def drawn(
        self, indices: Indices, columns: Sequence[str], seed: int, epochs: NDArray[np.int64]
    ) -> dict[str, torch.Tensor]:
        """Return the same as `batch`, of these epochs: images draw their random transforms anew, and texts go on in
        their rings."""
        check_columns(columns, self._columns)
        samples = checked(indices, len(self))
        arrays: dict[str, Array] = {
            name: np.empty((len(samples), *self._spec(name).shape), dtype=self._spec(name).dtype) for name in columns
        }
        blocks, block_of = np.unique(np.searchsorted(self._ends, samples, side="right"), return_inverse=True)
        for number, at in enumerate(blocks.tolist()):
            block, places = self._blocks[at], np.flatnonzero(block_of == number)
            wanted = BlockRows(block, samples[places] - block.first, seed, epochs[places])
            for name in columns:
                arrays[name][places] = self._read(name, wanted)
        return as_tensors(arrays)

    def _read(self, name: str, wanted: BlockRows) -> Array:
        found, spec = self._columns[name].read(wanted), self._spec(name)
        if found.shape[1:] != spec.shape or found.dtype.name != spec.dtype:
            first = wanted.block.first + int(wanted.rows[0])
            raise UserError(
                f"{KIND} column {name!r}, sample {first}: got {found.dtype} {list(found.shape[1:])}, expected "
                f"{spec.dtype} {list(spec.shape)} as the first sample has"
            )
        return found


def load_stream(options: StreamOptions, split: Split) -> StreamDataset:
    """UserError for files that cannot be read, columns that are not there, and a split without samples."""
    separate = options.heldout_path is not None
    paths = options.heldout_path if split == "heldout" and options.heldout_path is not None else options.path
    files = stream_files((paths,) if isinstance(paths, str) else paths)
    shards = _shards(files, options.index)
    index = _index(shards, options.text)
    places = [(file, number) for file, shard in enumerate(index) for number in range(len(shard.blocks))]
    if not places:
        raise UserError(f"{KIND} {files[0].url}: holds no samples")
    chosen = np.arange(len(places))
    if not separate:
        chosen = rows_of_split(len(places), options.holdout, split, f"{KIND} (blocks of {len(files)} files)")
    most = min(options.shuffle_blocks, len(places)) + 1
    rings = None
    if options.text:
        rings = TokenRings(shards, options.text, load_tokenizer(options.tokenizer), options.sequence_length, most)
    sizes = _rows(index) if rings is None else _windows(rings, index, options, bytes_known=shards.sizes_are_bytes)
    blocks: list[StreamBlock] = []
    for at in chosen.tolist():
        first = blocks[-1].first + blocks[-1].samples if blocks else 0
        blocks.append(StreamBlock(*places[at], first, sizes[at]))
    columns = _token_columns(rings, options) if rings is not None else _columns(shards, options, split, blocks[0], most)
    return StreamDataset(columns, blocks, options.shuffle_blocks, _identity(options, index, chosen, sizes))


def _shards(files: Sequence[StreamFile], index: str) -> Shards:
    if ending_of(files[0].url) == TAR:
        return TarShards(files, listed_shards(stream_file(index)) if index else None)
    if index:
        raise UserError(f"{KIND} option 'index': got {index!r} for Parquet files, expected none: each has its own")
    return ParquetShards(files)


def _index(shards: Shards, text: str) -> list[Shard]:
    numbers = range(len(shards.files))
    if not shards.files[0].is_remote:
        return [shards.shard(number, text) for number in numbers]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda number: shards.shard(number, text), numbers))


def _rows(index: Sequence[Shard]) -> list[int]:
    """Return the samples of each block."""
    return [samples for shard in index for samples in shard.blocks]


def _windows(rings: TokenRings, index: Sequence[Shard], options: StreamOptions, *, bytes_known: bool) -> list[int]:
    """Return the windows that each block's size promises, by the tokens that the first block has for its size: its true
    one, as those of Parquet files are estimates."""
    sizes = [size for shard in index for size in shard.text_sizes]
    file = next(number for number, shard in enumerate(index) if shard.blocks)
    size_bytes, tokens = rings.measured(StreamBlock(file, 0, 0, 0))
    if bytes_known:
        sizes[0] = size_bytes
    return [max(1, size * tokens // (sizes[0] * options.sequence_length)) for size in sizes]


def _token_columns(rings: TokenRings, options: StreamOptions) -> dict[str, StreamColumn]:
    if options.columns:
        raise UserError(f"{KIND} option 'columns': got them beside text, expected one of the two")
    return {"input_ids": TokenColumn(rings, 0), "labels": TokenColumn(rings, int(options.shift_labels))}


def _columns(
    shards: Shards, options: StreamOptions, split: Split, first: StreamBlock, most: int
) -> dict[str, StreamColumn]:
    forms = shards.columns()
    wanted = options.columns or {name: name for name, form in forms.items() if form == "numbers"}
    if not wanted:
        raise UserError(f"{KIND} option 'columns': missing, expected some of: {', '.join(forms)}")
    found: dict[str, StreamColumn] = {}
    for ours, theirs in wanted.items():
        if theirs not in forms:
            raise unknown_name(f"column of {shards.files[0].url}", theirs, forms)
        if forms[theirs] == "numbers":
            found[ours] = Numbers(shards, theirs, first, most)
        elif forms[theirs] == "image":
            pipeline = read_pipeline(options.transforms, options.mode, "transforms")
            if split == "heldout" and options.heldout_transforms is not None:
                pipeline = read_pipeline(options.heldout_transforms, options.mode, "heldout_transforms")
            elif split == "heldout":
                pipeline = pipeline.heldout()
            pixels = PixelOptions(mode=options.mode)
            found[ours] = Images(shards, theirs, first, most, pixels=pixels, pipeline=pipeline)
        else:
            raise UserError(
                f"{KIND} column {theirs!r}: holds neither numbers nor images; of texts, expected the option 'text'"
            )
    return found


_PLACES = ("path", "heldout_path", "index", "shuffle_blocks")  # settings that say nothing of the samples


def _identity(options: StreamOptions, index: Sequence[Shard], chosen: NDArray[np.int64], sizes: Sequence[int]) -> str:
    settings = {key: value for key, value in msgspec.to_builtins(options).items() if key not in _PLACES}
    if options.text:
        settings["tokenizer"] = load_tokenizer(options.tokenizer).identity
    digests = np.frombuffer(bytes.fromhex("".join(shard.digest for shard in index)), dtype=np.uint8)
    return fingerprint_of({"kind": KIND, **settings}, [digests, chosen, np.array(sizes, dtype=np.int64)])


MOST_OPEN_FILES = 8
_TAIL_BYTES = 8  # the footer's length and PAR1
_HEADER_BYTES = 64  # a page's header has less
_PAGES_BYTES = 1 << 10  # for headers of pages
_LENGTH_BYTES = 4  # before each text
_I32, _STRUCT = 5, 12
_SIZE_FIELD, _DICTIONARY_FIELD = 2, 7


class ParquetShards:
    sizes_are_bytes = True

    def __init__(self, files: Sequence[StreamFile]) -> None:
        self.files = files
        self._parquet = import_extra("pyarrow.parquet", f"data of kind {KIND}")
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

    def columns(self) -> dict[str, Form]:
        return {field.name: self._form(field.type) for field in self._file(0).schema_arrow}

    def _form(self, held: Any) -> Form:
        types = self._types
        if types.is_string(held) or types.is_large_string(held):
            return "text"
        if (types.is_struct(held) and held.get_field_index("bytes") >= 0) or types.is_binary(held):
            return "image"
        return "other" if number_type(held) is None else "numbers"

    def classes(self, name: str) -> int | None:
        return declared_classes(self._file(0).schema_arrow, name) or None

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
        """Return a column as one array of pyarrow's."""
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
