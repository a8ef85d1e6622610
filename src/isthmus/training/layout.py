"""Tensors as they travel: raw element bytes, and enough to rebuild the very same memory layout.

Kernels may sum in another order for another layout, so strides travel too: what arrives has the bits and the
strides of what was sent. Elements that fill their memory travel in the order in which they lie there, which needs no
copy on either side; all others travel in the order of their indices. Elements that a codec packs are packed in that
order, and take their strides again when they are unpacked.
"""

from __future__ import annotations

import math
import reprlib
from typing import cast

import msgspec
import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.plans import Packing
from isthmus.training.compression import codec_of
from isthmus.training.compression.codec import FLOATS
from isthmus.wire_types import Id, Shape, Text

MAX_DIMS = 16
MAX_SPREAD = 64
"""A hostile stride could claim any amount of memory: gaps may make a tensor this many times larger than its elements,
or `MAX_SPREAD_BYTES` large: the first token of every sequence spreads as far as a sequence is long."""
MAX_SPREAD_BYTES = 1 << 30
_INT64 = 2**63


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of a message: what it is, how its elements lie in memory, how they travel. Strides count elements."""

    name: Text
    dtype: Id
    shape: Shape
    stride: Shape
    packing: Packing | None = None  # None sends the elements' own bytes

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: those of the elements, without gaps. Zero strides (expanded) travel in full."""
        elements, element_bytes = math.prod(self.shape), DTYPE_BYTES[self.dtype]
        return self.packing.wire_bytes(elements, element_bytes) if self.packing else elements * element_bytes


def header_of(name: str, tensor: Tensor, packing: Packing | None = None) -> TensorHeader:
    """The header to send with `pack(tensor)`, or with the bytes that the packing's codec makes of `in_a_row(tensor)`.

    A layout that `check_header` refuses for its gaps is sent without.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    header = TensorHeader(name, dtype, tuple(tensor.shape), tuple(tensor.stride()), packing)
    if not _spreads_too_far(header):
        return header
    return msgspec.structs.replace(header, stride=row_stride(header.shape))


def row_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of elements that lie in the order of their indices."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def travels_in_a_row(header: TensorHeader) -> bool:
    """Return whether the elements travel in the order of their indices."""
    sizes = zip(header.shape, header.stride, row_stride(header.shape), strict=True)
    in_order = 0 in header.shape or all(size == 1 or stride == row for size, stride, row in sizes)
    return in_order or not _is_dense(header.shape, header.stride)


def check_header(header: TensorHeader) -> None:
    """Allocates nothing. PeerError for a header that no honest sender writes; it does not name the sender."""
    if (fault := _fault(header)) is not None:
        raise PeerError(f"tensor {reprlib.repr(header.name)}: {fault}")


def _fault(header: TensorHeader) -> str | None:
    if header.dtype not in DTYPE_BYTES:
        return f"unknown dtype {reprlib.repr(header.dtype)}, expected one of: {', '.join(sorted(DTYPE_BYTES))}"
    if len(header.shape) != len(header.stride) or len(header.shape) > MAX_DIMS:
        counts = f"{len(header.shape)} sizes and {len(header.stride)} strides"
        return f"{counts}, expected the same number, at most {MAX_DIMS}"
    layout = f"shape {header.shape} with stride {header.stride}"
    if any(number < 0 for number in (*header.shape, *header.stride)):
        return f"{layout} has a negative number"
    # The product without zeros: an empty tensor of absurd sizes would overflow inside torch.
    largest = max(math.prod(max(size, 1) for size in header.shape), _extent(header), *header.stride, 1)
    if largest * DTYPE_BYTES[header.dtype] >= _INT64:
        return f"{layout} is beyond any memory"
    if _spreads_too_far(header):
        return f"{layout} spreads its elements too far"
    if header.packing is not None and dtype_of(header) not in FLOATS:
        return f"dtype {header.dtype} packed as {header.packing.codec!r}, expected a floating point type"
    return None


def pack(tensor: Tensor) -> memoryview:
    """The elements as bytes, without a copy where they lie densely in host memory."""
    return bytes_of(in_a_row(tensor))


def in_a_row(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor, in the order in which they travel."""
    dense = tensor.detach()
    if not _is_dense(tuple(dense.shape), tuple(dense.stride())):
        dense = dense.contiguous()
    dense = dense.resolve_conj().resolve_neg()
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat contiguous tensor, on the host."""
    return flat.cpu().view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())


def receive_buffer(header: TensorHeader) -> tuple[Tensor, memoryview]:
    """An uninitialised flat tensor for what travels, and its bytes to receive into.

    The header has passed `check_header`. PeerError when so much memory cannot be had.
    """
    count, dtype = math.prod(header.shape), dtype_of(header)
    if header.packing is not None:
        count, dtype = header.nbytes, torch.uint8
    try:
        flat = torch.empty(count, dtype=dtype)
    except RuntimeError:
        raise _no_memory(header, header.nbytes) from None
    return flat, bytes_of(flat)


def unpack(flat: Tensor, header: TensorHeader) -> Tensor:
    """The tensor whose elements arrived in `flat`, with the sender's strides.

    It lies in the memory of `flat` where the sender's was dense and not packed. PeerError when memory cannot be had, or
    for a payload that no codec writes.
    """
    if header.packing is not None:
        flat = _decoded(flat, header)
    if flat.numel() == 0 or _is_dense(header.shape, header.stride):
        return flat.as_strided(header.shape, header.stride)
    # All elements along a zero stride are one: take the first.
    kept = tuple(1 if stride == 0 else size for size, stride in zip(header.shape, header.stride, strict=True))
    whole = flat.view(header.shape)
    for dim, size in enumerate(kept):
        whole = whole.narrow(dim, 0, size)
    try:
        # A graph can see the gaps: what was freed here before is not for it.
        result = torch.zeros(_extent(header), dtype=flat.dtype, device=flat.device).as_strided(kept, header.stride)
    except RuntimeError:
        raise _no_memory(header, _extent(header) * flat.element_size()) from None
    return result.copy_(whole).as_strided(header.shape, header.stride)


def _decoded(payload: Tensor, header: TensorHeader) -> Tensor:
    assert header.packing is not None
    elements = math.prod(header.shape)
    try:
        return codec_of(header.packing).decode(payload, (elements,), dtype_of(header), header.name)
    except RuntimeError:
        raise _no_memory(header, elements * DTYPE_BYTES[header.dtype]) from None


def dtype_of(header: TensorHeader) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, header.dtype))


def _no_memory(header: TensorHeader, size_bytes: int) -> PeerError:
    return PeerError(f"tensor {reprlib.repr(header.name)}: no memory here for its {size_bytes} bytes")


def _extent(header: TensorHeader) -> int:
    """Elements of memory from the first to the last, gaps included."""
    if 0 in header.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(header.shape, header.stride, strict=True))


def _spreads_too_far(header: TensorHeader) -> bool:
    extent_bytes = _extent(header) * DTYPE_BYTES.get(header.dtype, 1)
    return extent_bytes > MAX_SPREAD_BYTES and _extent(header) > MAX_SPREAD * math.prod(header.shape)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for step, size in sorted((t, s) for s, t in zip(shape, stride, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= size
    return True
