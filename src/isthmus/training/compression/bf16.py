"""Every element as bfloat16: two bytes, eight bits of precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.plans import Packing
from isthmus.training.compression.codec import (
    as_bytes,
    check_decoded,
    check_finite,
    checked_payload,
    flat_floats,
    from_wide,
    pieces,
    to_bf16,
)


@dataclass(frozen=True)
class Bf16:
    """Rounds to bfloat16. The error is at most 2**-8 of an element's magnitude (2**-134 for subnormal elements)."""

    name: str = "bf16"

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = flat_floats(tensor, self.name, name)
        found = torch.empty_like(flat, dtype=torch.bfloat16)
        for part in pieces(flat):
            check_finite(flat[part], self.name, name)
            found[part] = to_bf16(flat[part])
        return as_bytes(found)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        values = checked_payload(self, payload, shape, dtype, name).view(torch.bfloat16)
        found = torch.empty_like(values, dtype=dtype)
        for part in pieces(values):
            check_decoded(values[part], self.name, name)
            found[part] = from_wide(values[part], dtype)
        return found.view(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return Packing(codec=self.name).wire_bytes(elements)
