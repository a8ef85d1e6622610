"""Every element as a signed byte, with one float32 scale for each block of 256."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.plans import Packing
from isthmus.plans.packing import INT8_BLOCK
from isthmus.training.compression.codec import (
    check_decoded,
    check_extremes,
    checked_payload,
    flat_floats,
    from_wide,
    pieces,
)

LEVELS = 127
LARGEST_SCALE = torch.finfo(torch.float32).max / LEVELS * (1 - 2**-23)
"""Rounded up, the scale of float32's largest number would give Inf back."""


@dataclass(frozen=True)
class Int8:
    """Rounds to 8 bits with a scale per block. The error is at most half a scale: the largest magnitude of the block /
    254.

    Layout: the scales, then the bytes.
    """

    name: str = "int8"

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = flat_floats(tensor, self.name, name)
        payload = torch.empty(self.wire_bytes(flat.numel(), flat.dtype), dtype=torch.uint8, device=flat.device)
        scales, steps = _halves(payload, flat.numel())
        # By a number GPUs multiply with its reciprocal, which rounds otherwise
        levels = torch.full((), float(LEVELS), device=flat.device)
        for part in pieces(flat):
            blocks = _blocks(flat[part])
            extremes = blocks.abs().amax(1)
            check_extremes(extremes.max().item(), self.name, name)
            scale = (extremes.to(torch.float32) / levels).clamp(max=LARGEST_SCALE)
            divisor = torch.where(scale > 0, scale, 1.0)  # nothing but zeros, or numbers too small for a scale
            found = (blocks / divisor[:, None]).round_().clamp_(-LEVELS, LEVELS)
            scales[_of_blocks(part)] = scale
            steps[part] = found.view(-1)[: part.stop - part.start].to(torch.int8)
        return payload

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        data = checked_payload(self, payload, shape, dtype, name)
        scales, steps = _halves(data, math.prod(shape))
        found = torch.empty(steps.numel(), dtype=dtype, device=data.device)
        for part in pieces(steps):
            scale = scales[_of_blocks(part)]
            check_decoded(scale * LEVELS, self.name, name)
            blocks = _blocks(steps[part].clamp(min=-LEVELS).to(torch.float32))  # -128 is nobody's, and might be Inf
            found[part] = from_wide(blocks.mul_(scale[:, None]).view(-1)[: part.stop - part.start], dtype)
        return found.view(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return Packing(codec=self.name).wire_bytes(elements)


def _halves(payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Scales and steps."""
    head = payload.numel() - elements
    return payload[:head].view(torch.float32), payload[head:].view(torch.int8)


def _blocks(flat: Tensor) -> Tensor:
    return functional.pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)


def _of_blocks(part: slice) -> slice:
    return slice(part.start // INT8_BLOCK, -(-part.stop // INT8_BLOCK))
