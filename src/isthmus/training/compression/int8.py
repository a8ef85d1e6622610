"""Every element as a signed byte, with one float32 scale for each block of 256."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.plan import Packing
from isthmus.plan.packing import INT8_BLOCK
from isthmus.training.compression.codec import (
    as_bytes,
    check_decoded,
    check_extremes,
    checked_payload,
    flat_floats,
    from_wide,
)

LEVELS = 127
LARGEST_SCALE = torch.finfo(torch.float32).max / LEVELS * (1 - 2**-23)
"""Rounded up, the scale of float32's largest number would give Inf back."""


@dataclass(frozen=True)
class Int8:
    """What comes back differs by at most half a scale: the largest magnitude of the element's block / 254.

    Layout: the scales, then the bytes.
    """

    name: str = "int8"

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = flat_floats(tensor, self.name, name)
        blocks = _blocks(flat)
        largest = blocks.abs().amax(1) if flat.numel() else flat
        check_extremes(largest.max().item() if flat.numel() else 0.0, self.name, name)
        scales = (largest.to(torch.float32) / LEVELS).clamp(max=LARGEST_SCALE)
        divisors = torch.where(scales > 0, scales, 1.0)  # nothing but zeros, or numbers too small for a scale
        steps = (blocks / divisors[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
        return torch.cat([as_bytes(scales), as_bytes(steps.view(-1)[: flat.numel()])])

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        data = checked_payload(self, payload, shape, dtype, name)
        elements = math.prod(shape)
        head = 4 * -(-elements // INT8_BLOCK)
        scales = data[:head].view(torch.float32)
        check_decoded(scales * LEVELS, self.name, name)
        steps = data[head:].view(torch.int8).clamp(min=-LEVELS)  # -128 is nobody's, and might be Inf
        found = _blocks(steps.to(torch.float32)).mul_(scales[:, None])
        return from_wide(found.view(-1)[:elements], dtype).reshape(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return Packing(codec=self.name).wire_bytes(elements)


def _blocks(flat: Tensor) -> Tensor:
    return functional.pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)
