"""How the cells of a block become samples: numbers, images that are decoded when a batch asks for them, and texts."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import Array, ColumnSpec
from isthmus.data.images.decoding import PixelOptions, decode
from isthmus.data.images.pipeline import ImagePipeline
from isthmus.data.streams.files import KIND, Shards
from isthmus.data.tokenizer import Tokenizer, tokens_of
from isthmus.errors import StepError
from isthmus.rng import stream

Held = TypeVar("Held")


class StreamBlock(msgspec.Struct, frozen=True):
    file: int
    number: int  # in the file
    first: int  # the number of this block's first sample in the data set
    samples: int


class BlockRows(msgspec.Struct, frozen=True):
    """Samples of one block in the epochs in which they are read."""

    block: StreamBlock
    rows: NDArray[np.int64]  # in the block
    seed: int
    epochs: NDArray[np.int64]


class StreamColumn(Protocol):
    @property
    def spec(self) -> ColumnSpec:
        """The first block may be read for it."""
        ...

    def read(self, wanted: BlockRows) -> Array:
        """[rows, *shape]"""
        ...


class RecentBlocks(Generic[Held]):
    """The blocks of one column that were used last."""

    def __init__(self, most: int, load: Callable[[StreamBlock], Held]) -> None:
        self._most = most
        self._load = load
        self._held: OrderedDict[int, Held] = OrderedDict()

    def get(self, block: StreamBlock) -> Held:
        if block.first not in self._held:
            while len(self._held) >= self._most:
                self._held.popitem(last=False)  # before the next is read: both at once may be too much
            self._held[block.first] = self._load(block)
        self._held.move_to_end(block.first)
        return self._held[block.first]


class Numbers:
    def __init__(self, shards: Shards, name: str, first: StreamBlock, most: int) -> None:
        self._name = name
        self._first = first
        self._limit = shards.classes(name)
        self._blocks = RecentBlocks[Array](most, lambda b: shards.numbers(b.file, b.number, name))

    @property
    def spec(self) -> ColumnSpec:
        first = self._blocks.get(self._first)
        return ColumnSpec(dtype=first.dtype.name, shape=first.shape[1:], limit=self._limit)

    def read(self, wanted: BlockRows) -> Array:
        return self._blocks.get(wanted.block)[wanted.rows]


class Images:
    """Pixels as of the other kinds of image data: float32 [channels, height, width]."""

    def __init__(
        self,
        shards: Shards,
        name: str,
        first: StreamBlock,
        most: int,
        *,
        pixels: PixelOptions,
        pipeline: ImagePipeline,
    ) -> None:
        self._shards = shards
        self._name = name
        self._first = first
        self._pixels = pixels
        self._pipeline = pipeline
        self._blocks = RecentBlocks[list[bytes]](most, lambda b: shards.contents(b.file, b.number, name))

    @property
    def spec(self) -> ColumnSpec:
        return ColumnSpec(dtype="float32", shape=self._decoded(self._first, 0, 0, 0).shape)

    def read(self, wanted: BlockRows) -> Array:
        rows = zip(wanted.rows.tolist(), wanted.epochs.tolist(), strict=True)
        return np.stack([self._decoded(wanted.block, row, wanted.seed, epoch) for row, epoch in rows])

    def _decoded(self, block: StreamBlock, row: int, seed: int, epoch: int) -> NDArray[np.float32]:
        sample = block.first + row
        named = f"{KIND} {self._shards.files[block.file].url} column {self._name!r} (sample {sample})"
        image = decode(io.BytesIO(self._blocks.get(block)[row]), named, self._pixels)
        return self._pipeline.applied(image, stream(seed, "augment", epoch, sample), named)


class TokenRings:
    """Windows of tokens. The texts of a block are joined, one per line, and their tokens are a ring.

    How many tokens a block has is not known before it is read. So an epoch takes as many windows as its size promises,
    and the next epoch goes on in the ring where this one stopped: nothing is left out for ever, and any window is found
    without reading another block.
    """

    def __init__(self, shards: Shards, name: str, tokenizer: Tokenizer, length: int, most: int) -> None:
        self._shards = shards
        self._name = name
        self._tokenizer = tokenizer
        self._length = length
        self._blocks = RecentBlocks[NDArray[np.integer]](most, self.tokens)

    @property
    def spec(self) -> ColumnSpec:
        return ColumnSpec(dtype="int64", shape=(self._length,), limit=self._tokenizer.vocab_size)

    def tokens(self, block: StreamBlock) -> NDArray[np.integer]:
        """[tokens] of a block. StepError for one without any."""
        return self._tokens_of(block, self._lines(block))

    def measured(self, block: StreamBlock) -> tuple[int, int]:
        """Bytes and tokens of a block."""
        lines = self._lines(block)
        return sum(map(len, lines)), len(self._tokens_of(block, lines))

    def _lines(self, block: StreamBlock) -> list[bytes]:
        texts = self._shards.contents(block.file, block.number, self._name)
        return [text.rstrip(b"\n") + b"\n" for text in texts]

    def _tokens_of(self, block: StreamBlock, lines: Sequence[bytes]) -> NDArray[np.integer]:
        named = f"{KIND} {self._shards.files[block.file].url} column {self._name!r}, block {block.number}"
        parts = [tokens_of(self._tokenizer, line, f"{named}, text {n}") for n, line in enumerate(lines, 1)]
        found = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        if not len(found):
            url = self._shards.files[block.file].url
            raise StepError(f"{KIND} {url} column {self._name!r}", f"block {block.number} holds no text")
        return found

    def read(self, wanted: BlockRows, shift: int = 0) -> Array:
        """Windows that begin `shift` tokens later."""
        ring = self._blocks.get(wanted.block)
        windows = wanted.epochs * wanted.block.samples + wanted.rows
        places = windows[:, None] * self._length + np.arange(self._length) + shift
        return ring[places % len(ring)].astype(np.int64)


class TokenColumn:
    """A side of the windows: the inputs, or the tokens that follow them."""

    def __init__(self, rings: TokenRings, shift: int) -> None:
        self._rings = rings
        self._shift = shift

    @property
    def spec(self) -> ColumnSpec:
        return self._rings.spec

    def read(self, wanted: BlockRows) -> Array:
        return self._rings.read(wanted, self._shift)
