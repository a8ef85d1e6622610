"""Every element as bfloat16: two bytes, eight bits of precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.plan import Packing
from isthmus.training.compression.codec import (
    as_bytes,
    check_decoded,
    check_finite,
    checked_payload,
    flat_floats,
    from_wide,
    to_bf16,
)


@dataclass(frozen=True)
class Bf16:
    """What comes back differs by at most 2**-8 of an element's magnitude (2**-134 for subnormal ones)."""

    name: str = "bf16"

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = flat_floats(tensor, self.name, name)
        check_finite(flat, self.name, name)
        return as_bytes(to_bf16(flat))

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        values = checked_payload(self, payload, shape, dtype, name).view(torch.bfloat16)
        check_decoded(values, self.name, name)
        return from_wide(values, dtype).view(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return Packing(codec=self.name).wire_bytes(elements)
