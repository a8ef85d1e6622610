"""Tensors as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.plans import Packing
from isthmus.training.compression.codec import as_bytes, checked_size


@dataclass(frozen=True)
class NoCodec:
    """Any type, any value, bit for bit."""

    name: str = "none"

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = tensor.detach().reshape(-1).clone()  # a payload never shares memory with what may change
        return as_bytes(flat) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        data = checked_size(self, payload, shape, dtype, name)
        return data.clone().view(dtype).view(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return Packing(codec=self.name).wire_bytes(elements, dtype.itemsize)
