"""The interface of codecs, from a tensor to a known number of bytes and back; and the codec that a plan or a message
names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.extensions import import_object
from isthmus.plans import Packing
from isthmus.plans.packing import CODECS

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PIECE = 1 << 18  # elements; a multiple of every codec's block
_LARGEST = torch.finfo(torch.bfloat16).max
"""Packed values are at most this large: larger ones of float32 are within bfloat16's own rounding of it."""


class DeltaCodec(Protocol):
    """A way to pack a tensor into bytes."""

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        """The payload: a flat uint8 tensor on the tensor's device.

        Elements are taken in the order of their indices, whatever the strides. `name` is what errors call the tensor.
        All codecs but `none` raise UserError for NaN, Inf and types that are not floating point.
        """
        ...

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        """A new contiguous tensor of this shape and type, on the payload's device, from bytes that nobody vouches for.

        Raises PeerError for a payload that `encode` does not write; its size is checked before anything is allocated.
        """
        ...


class Codec(DeltaCodec, Protocol):
    """A codec that plans know of. Codecs are values: what they remember of earlier tensors is `ErrorFeedback`'s."""

    @property
    def name(self) -> str: ...

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """The payload's exact size, whatever the values. Of `EntropyCoded` the most."""
        ...


def flat_floats(tensor: Tensor, codec: str, name: str) -> Tensor:
    """All elements in a row. UserError for a type that is no floating point type."""
    if tensor.dtype not in FLOATS:
        raise UserError(f"{codec} of {name!r}: got {tensor.dtype}, expected a floating point type")
    return tensor.detach().reshape(-1)


def check_finite(values: Tensor, codec: str, name: str) -> None:
    """UserError where there is a NaN, an Inf, or a number beyond float32."""
    if values.numel():
        low, high = torch.aminmax(values)  # NaN comes through
        check_extremes(max(abs(low.item()), abs(high.item())) if low == low else math.nan, codec, name)


def check_extremes(largest: float, codec: str, name: str) -> None:
    """The same where the largest magnitude is known."""
    if not largest <= torch.finfo(torch.float32).max:
        raise UserError(
            f"{codec} of {name!r}: got {'an element beyond float32' if math.isfinite(largest) else 'NaN or Inf'}, "
            "expected finite numbers: packed they would spoil others; without compression they are sent as they are"
        )


def to_bf16(values: Tensor) -> Tensor:
    """Finite numbers as bfloat16: nearest, and never Inf."""
    if values.dtype in (torch.float32, torch.float64):
        values = values.clamp(-_LARGEST, _LARGEST)
    return values.to(torch.bfloat16)


def from_wide(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded values in the type that was packed: float16 ends where bfloat16 rounds up to more."""
    if dtype == torch.float16:
        return values.to(torch.float32).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return values.to(dtype)


def checked_payload(codec: Codec, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    """The payload's bytes, aligned for any type. PeerError when it is not what the codec writes for such a tensor."""
    if dtype not in FLOATS:
        raise PeerError(f"{codec.name} of {name!r}: announced as {dtype}, expected a floating point type")
    return checked_size(codec, payload, shape, dtype, name)


def checked_size(codec: Codec, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    """The same for any type."""
    expected = codec.wire_bytes(math.prod(shape), dtype)
    if min(shape, default=0) < 0 or payload.dtype != torch.uint8 or tuple(payload.shape) != (expected,):
        raise PeerError(
            f"{codec.name} of {name!r}: got a payload of {tuple(payload.shape)} x {payload.dtype}, "
            f"expected {expected} bytes for shape {tuple(shape)}"
        )
    return payload.clone() if payload.storage_offset() % 8 or not payload.is_contiguous() else payload


def check_decoded(values: Tensor, codec: str, name: str) -> None:
    """PeerError where the payload says NaN or Inf, which no honest sender packs."""
    if values.numel():
        low, high = torch.aminmax(values)
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            raise PeerError(f"{codec} of {name!r}: the payload holds NaN or Inf")


def pieces(flat: Tensor) -> Iterator[slice]:
    """The whole of a flat tensor; on a CPU piece after piece, so small that what is made of one stays in its caches."""
    size = PIECE if flat.device.type == "cpu" else max(1, flat.numel())
    for start in range(0, flat.numel(), size):
        yield slice(start, min(start + size, flat.numel()))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a flat contiguous tensor."""
    return tensor.view(torch.uint8)


def codec_of(packing: Packing) -> Codec:
    """The codec that a plan or a message names: which has been checked, as a `Packing` checks itself."""
    entry = CODECS[packing.codec]
    make = cast("Callable[..., Codec]", import_object("codec", entry.maker))
    return make(packing.ratio) if entry.is_sparse else make()
