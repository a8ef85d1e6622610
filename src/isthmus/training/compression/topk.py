"""The elements of largest magnitude as bfloat16, and where they stand; the others come back as zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.plans import Packing
from isthmus.plans.packing import kept
from isthmus.training.compression.codec import (
    as_bytes,
    check_decoded,
    check_finite,
    checked_payload,
    flat_floats,
    from_wide,
    to_bf16,
)
from isthmus.training.compression.selection import largest, pack_positions, unpack_positions


@dataclass(frozen=True)
class TopK:
    """Sends the ceil(d / ratio) largest of d elements, in at most 4 bytes each for ratios up to 16,384.

    FusionLLM's codec (section 5.1), whose 12 bytes for each become 3.07 at ratio 100. Layout: values, then positions.
    """

    ratio: float
    name: str = "topk"

    def __post_init__(self) -> None:
        Packing(codec=self.name, ratio=self.ratio)  # UserError for a ratio below 1

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = flat_floats(tensor, self.name, name)
        where = largest(flat, kept(flat.numel(), self.ratio))
        values = flat[where]
        check_finite(values, self.name, name)  # NaN and Inf are the largest of all: any that there is was taken
        return torch.cat([as_bytes(to_bf16(values)), pack_positions(where, flat.numel())])

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        data = checked_payload(self, payload, shape, dtype, name)
        elements = math.prod(shape)
        count = kept(elements, self.ratio)
        values = data[: 2 * count].view(torch.bfloat16)
        check_decoded(values, self.name, name)
        where = unpack_positions(data[2 * count :], elements, count, f"{self.name} of {name!r}")
        found = torch.zeros(elements, dtype=dtype, device=payload.device)
        found[where] = from_wide(values, dtype)
        return found.view(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return Packing(codec=self.name, ratio=self.ratio).wire_bytes(elements)
