"""Several tensors as few: one message instead of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedTensors:
    """Copies of tensors, side by side."""

    flats: tuple[Tensor, ...]
    """One per dtype and device, each of shape (elements,)."""
    views: tuple[Tensor, ...]
    """Into `flats`, in the order and with the shapes of what was packed."""

    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        for tensor, view in zip(tensors, self.views, strict=True):
            tensor.copy_(view)


@torch.no_grad()
def pack(tensors: Sequence[Tensor]) -> PackedTensors:
    """Copy dense tensors into one flat tensor per dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    flats = tuple(torch.cat([tensors[n].detach().reshape(-1) for n in numbers]) for numbers in kinds.values())
    views: dict[int, Tensor] = {}
    for flat, numbers in zip(flats, kinds.values(), strict=True):
        parts = flat.split([tensors[n].numel() for n in numbers])
        views.update((n, part.view(tensors[n].shape)) for n, part in zip(numbers, parts, strict=True))
    return PackedTensors(flats, tuple(views[n] for n in range(len(tensors))))
