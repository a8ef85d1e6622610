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
from isthmus.data.images.pipeline import Table, pipeline_of
from isthmus.data.layout import Layout, layout_of
from isthmus.data.streams.columns import BlockRows, Images, Numbers, StreamBlock, StreamColumn, TokenColumn, TokenRings
from isthmus.data.streams.files import KIND, TAR, Shard, Shards, StreamFile, ending_of, stream_file, stream_files
from isthmus.data.streams.parquet_shards import ParquetShards
from isthmus.data.streams.tar_shards import TarShards, listed_shards
from isthmus.data.text import WindowOptions
from isthmus.data.tokenizer import load_tokenizer
from isthmus.errors import UserError, unknown_name

if TYPE_CHECKING:
    import torch

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
            pipeline = pipeline_of(split, options.transforms, options.heldout_transforms, options.mode)
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
