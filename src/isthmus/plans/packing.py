"""Which codec packs a tensor, and how many bytes that makes: to the byte, for planners and for those who encode.

Every codec's payload has a size that follows from the number of elements alone. So a plan can state what a link will
carry, a receiver knows what to allocate before anything arrives, and collectives can exchange payloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from isthmus.errors import UserError, unknown_name
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.wire_types import Id, NotNegative

INT8_BLOCK = 256  # elements that share a float32 scale
INT4_TILE = 64  # elements that are transformed together
SPARSE_CHUNK = 4096  # elements among which `sparse2bit` keeps the largest, and whose kept ones share two levels
PACKED_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Types that codecs take; all else travels as it is."""


class Packing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A codec and its setting. Raises UserError for an unknown codec, or a ratio that it cannot have."""

    codec: Id
    ratio: NotNegative = 1.0  # elements of a tensor per element that is sent: 100 keeps 1 % of them, 1 keeps all
    feedback: bool = False
    """Whether the error of a sample's gradient is added to that of the same sample when it comes again."""

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise unknown_name("codec", self.codec, CODECS)
        if not 1 <= self.ratio < math.inf:
            raise UserError(f"ratio: got {self.ratio}, expected a finite number of at least 1")
        if not CODECS[self.codec].is_sparse and self.ratio != 1:
            raise UserError(f"ratio: got {self.ratio} for {self.codec!r}, expected 1: it sends all elements")

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Bytes of a packed tensor of so many elements; `element_bytes` of each matters to `none` only."""
        return CODECS[self.codec].wire_bytes(elements, self.ratio, element_bytes)

    def saves(self, elements: int, dtype: str) -> int:
        """Bytes by which packing makes a tensor shorter; 0 where it would not, and the tensor travels as it is."""
        if dtype not in PACKED_DTYPES:
            return 0
        element_bytes = DTYPE_BYTES[dtype]
        return max(0, elements * element_bytes - self.wire_bytes(elements, element_bytes))

    def bytes_per_element(self, element_bytes: int = 4) -> float:
        """Return the bytes per element of a large tensor."""
        return self.wire_bytes(1 << 40, element_bytes) / (1 << 40)


def kept(elements: int, ratio: float) -> int:
    """Return how many elements are sent of so many."""
    return math.ceil(elements / ratio)


def kept_in_chunks(elements: int, ratio: float) -> int:
    """The same, rounded up in each chunk."""
    whole, rest = divmod(elements, SPARSE_CHUNK)
    return whole * kept(SPARSE_CHUNK, ratio) + kept(rest, ratio)


def low_bits(elements: int, count: int) -> int:
    """Return how many low bits of each position Elias and Fano write as they are: of `count` positions below
    `elements`."""
    return (elements // count).bit_length() - 1 if count else 0


def high_bits(elements: int, count: int) -> int:
    """Length of the unary code of what is left of the positions: a one for each, a zero for each step."""
    return count + (elements - 1 >> low_bits(elements, count)) if count else 0


def uses_bitmap(elements: int, count: int) -> bool:
    """Return whether one bit for every element takes no more than Elias and Fano's code."""
    return -(-elements // 8) <= _coded_bytes(elements, count)


def position_bytes(elements: int, count: int) -> int:
    """Bytes that say which `count` of `elements` are sent: a bitmap, or Elias and Fano's code where that is shorter.

    The code takes at most 2 + log2(elements / count) bits for each: 8.6 at 1 %, where a 64-bit index takes 64.
    """
    return min(-(-elements // 8), _coded_bytes(elements, count))


def _coded_bytes(elements: int, count: int) -> int:
    return -(-count * low_bits(elements, count) // 8) + -(-high_bits(elements, count) // 8)


def int4_bytes(elements: int, tile: int = INT4_TILE) -> int:
    """Counts for each tile: step and lowest value as bfloat16, the pivot's place, and the levels."""
    return (5 + tile // 2) * -(-elements // tile)


def _topk_bytes(elements: int, ratio: float, _element_bytes: int) -> int:
    """Two bytes for each value, and the positions."""
    count = kept(elements, ratio)
    return 2 * count + position_bytes(elements, count)


def _sparse2bit_bytes(elements: int, ratio: float, _element_bytes: int) -> int:
    """Two levels of two bytes for each chunk, two bits for each kept element, and the positions."""
    count = kept_in_chunks(elements, ratio)
    return 4 * -(-elements // SPARSE_CHUNK) + -(-2 * count // 8) + position_bytes(elements, count)


class CodecEntry(NamedTuple):
    """Facts of a codec that need no PyTorch."""

    maker: str  # `module:class`, by name since plans know no PyTorch. The class of a sparse codec takes the ratio.
    wire_bytes: Callable[[int, float, int], int]
    """The size of a payload in bytes, from the elements, the ratio, and the bytes of an element before packing."""
    summary: str
    is_sparse: bool = False  # whether it sends some elements only, so that its ratio may be more than 1


_FOLDER = "isthmus.training.compression"
CODECS: Mapping[str, CodecEntry] = {
    "none": CodecEntry(f"{_FOLDER}.none:NoCodec", lambda d, _ratio, each: d * each, "Every element as it is."),
    "bf16": CodecEntry(f"{_FOLDER}.bf16:Bf16", lambda d, _ratio, _each: 2 * d, "Two bytes for every element."),
    "int8": CodecEntry(
        f"{_FOLDER}.int8:Int8",
        lambda d, _ratio, _each: d + 4 * -(-d // INT8_BLOCK),
        f"One byte for every element, and a scale for each {INT8_BLOCK} of them.",
    ),
    "int4": CodecEntry(
        f"{_FOLDER}.int4:Int4",
        lambda d, _ratio, _each: int4_bytes(d),
        f"Four bits for every element, and five bytes for each {INT4_TILE}, which a Hadamard transform mixes.",
    ),
    "topk": CodecEntry(f"{_FOLDER}.topk:TopK", _topk_bytes, "The largest elements as bfloat16.", is_sparse=True),
    "sparse2bit": CodecEntry(
        f"{_FOLDER}.sparse2bit:Sparse2Bit",
        _sparse2bit_bytes,
        "The largest elements of each chunk, as one of two levels and a sign.",
        is_sparse=True,
    ),
}
DENSE = tuple(name for name, codec in CODECS.items() if not codec.is_sparse and name != "none")
"""Codecs that send every element in fewer bytes: `[compression]` takes each as a method."""


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of an edge. Raises UserError for an unknown codec, a ratio below 1 or negative bytes."""

    codec: str
    ratio: float = 1.0  # elements of a tensor per element that is sent: 100 keeps 1 % of them, 1 keeps all
    feedback: bool = False
    """Whether the sender adds what it left out of a sample's gradient to that of the same sample in the next pass."""
    wire_bytes: int  # bytes of one micro-batch's message, with the tensors that the codec leaves as they are

    def __post_init__(self) -> None:
        try:
            _ = self.packing
        except UserError as e:
            raise UserError(f"compression: {e}") from None
        if self.wire_bytes < 0:
            raise UserError(f"compression: wire_bytes: got {self.wire_bytes}, expected at least 0")

    @property
    def packing(self) -> Packing:
        return Packing(codec=self.codec, ratio=self.ratio, feedback=self.feedback)
