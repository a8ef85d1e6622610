"""Which codec packs a tensor, and how many bytes that makes: to the byte, for planners and for those who encode.

Every codec's payload has a size that follows from the number of elements alone. So a plan can state what a link will
carry, a receiver knows what to allocate before anything arrives, and collectives can exchange payloads.
"""

from __future__ import annotations

import math

import msgspec

from isthmus.errors import UserError, unknown_name
from isthmus.graph.opgraph import DTYPE_BYTES

INT8_BLOCK = 256
"""Elements that share a float32 scale."""
SPARSE_CHUNK = 4096
"""Elements among which `sparse2bit` keeps the largest, and whose kept ones share two levels."""
CODECS = ("none", "bf16", "int8", "topk", "sparse2bit")
SPARSE = ("topk", "sparse2bit")
"""Those whose ratio is more than 1."""
PACKED_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
"""What codecs take; all else travels as it is."""


class Packing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A codec and its setting. Raises UserError for an unknown codec, or a ratio that it cannot have."""

    codec: str
    ratio: float = 1.0
    """Elements of a tensor per element that is sent: 100 keeps 1 % of them, 1 keeps all."""
    feedback: bool = False
    """Of gradients: what was left out of a sample's is added to that of the same sample when it comes again."""

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise unknown_name("codec", self.codec, CODECS)
        if not 1 <= self.ratio < math.inf:
            raise UserError(f"ratio: got {self.ratio}, expected a finite number of at least 1")
        if self.codec not in SPARSE and self.ratio != 1:
            raise UserError(f"ratio: got {self.ratio} for {self.codec!r}, expected 1: it sends all elements")

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Bytes of a packed tensor of so many elements; `element_bytes` of each matters to `none` only."""
        match self.codec:
            case "none":
                return elements * element_bytes
            case "bf16":
                return 2 * elements
            case "int8":
                return elements + 4 * -(-elements // INT8_BLOCK)
            case "topk":
                count = kept(elements, self.ratio)
                return 2 * count + position_bytes(elements, count)
            case _:
                count = kept_in_chunks(elements, self.ratio)
                chunks = -(-elements // SPARSE_CHUNK)
                return 4 * chunks + -(-2 * count // 8) + position_bytes(elements, count)

    def saves(self, elements: int, dtype: str) -> int:
        """Bytes by which packing makes a tensor shorter; 0 where it would not, and the tensor travels as it is."""
        if dtype not in PACKED_DTYPES:
            return 0
        element_bytes = DTYPE_BYTES[dtype]
        return max(0, elements * element_bytes - self.wire_bytes(elements, element_bytes))

    def bytes_per_element(self, element_bytes: int = 4) -> float:
        """Of a large tensor."""
        return self.wire_bytes(1 << 40, element_bytes) / (1 << 40)


def kept(elements: int, ratio: float) -> int:
    """How many elements are sent of so many."""
    return math.ceil(elements / ratio)


def kept_in_chunks(elements: int, ratio: float) -> int:
    """The same, rounded up in each chunk."""
    whole, rest = divmod(elements, SPARSE_CHUNK)
    return whole * kept(SPARSE_CHUNK, ratio) + kept(rest, ratio)


def low_bits(elements: int, count: int) -> int:
    """How many low bits of each position Elias and Fano write as they are: of `count` positions below `elements`."""
    return (elements // count).bit_length() - 1 if count else 0


def high_bits(elements: int, count: int) -> int:
    """Length of the unary code of what is left of the positions: a one for each, a zero for each step."""
    return count + (elements - 1 >> low_bits(elements, count)) if count else 0


def uses_bitmap(elements: int, count: int) -> bool:
    """Whether one bit for every element takes no more than Elias and Fano's code."""
    return -(-elements // 8) <= _coded_bytes(elements, count)


def position_bytes(elements: int, count: int) -> int:
    """Bytes that say which `count` of `elements` are sent: a bitmap, or Elias and Fano's code where that is shorter.

    The code takes at most 2 + log2(elements / count) bits for each: 8.6 at 1 %, where a 64-bit index takes 64.
    """
    return min(-(-elements // 8), _coded_bytes(elements, count))


def _coded_bytes(elements: int, count: int) -> int:
    return -(-count * low_bits(elements, count) // 8) + -(-high_bits(elements, count) // 8)
