"""Copies between the host and an accelerator for one thread, through host buffers that are used again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import Accelerator, Event

ALIGNMENT_BYTES = 64


class Transfer:
    """On the current stream of the thread that calls. On the CPU nothing is copied."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._up = _Buffer(accelerator)
        self._down = _Buffer(accelerator)

    def up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values on the accelerator. The host may change its own as soon as this returns."""
        if not self.accelerator.asynchronous:
            return dict(values)
        device = self.accelerator.device
        found = {name: torch.empty(v.shape, dtype=v.dtype, device=device) for name, v in values.items()}
        for place, value, to in zip(self._up.places(values.values()), values.values(), found.values(), strict=True):
            to.copy_(place.copy_(value), non_blocking=True)
        self._up.busy = self.accelerator.record()
        return found

    def down(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values on the host, once their work is done: this thread waits for it. They last until the next call."""
        if not self.accelerator.asynchronous:
            return dict(values)
        places = self._down.places(values.values())
        for place, value in zip(places, values.values(), strict=True):
            place.copy_(value, non_blocking=True)
        copied = self.accelerator.record()
        copied.synchronize()
        return dict(zip(values, places, strict=True))


class _Buffer:
    """Host memory that grows with what is asked of it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.busy: Event | None = None
        """A copy that may still read it."""

    def places(self, values: Collection[Tensor]) -> list[Tensor]:
        """Of the values' shapes and types, one after another, when nothing reads the buffer any more."""
        if self.busy is not None:
            self.busy.synchronize()
            self.busy = None
        sizes = [v.numel() * v.element_size() for v in values]
        needed = sum(_aligned(size) for size in sizes)
        if needed > len(self._bytes):
            self._bytes = self._accelerator.host_buffer(needed)
        found: list[Tensor] = []
        at = 0
        for value, size in zip(values, sizes, strict=True):
            found.append(self._bytes[at : at + size].view(value.dtype).view(value.shape))
            at += _aligned(size)
        return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
