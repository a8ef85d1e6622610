"""Copies between the host and an accelerator that stop neither: by way of host buffers, with an event behind them.

A copy from or to pageable memory, and `item()`, `tolist()`, `cpu()` of a tensor of the accelerator, make the host wait
for all that its stream has been given. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import Accelerator


class PendingRead:
    """Numbers on their way to the host, behind what the current stream has been given so far."""

    def __init__(self, accelerator: Accelerator, numbers: Tensor) -> None:
        self._found = numbers
        self._done = None
        if accelerator.asynchronous and numbers.numel():
            self._found = host_like(accelerator, numbers)
            self._found.copy_(numbers, non_blocking=True)
            self._done = accelerator.record()

    def values(self) -> Tensor:
        """On the host; waits until they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._found


def to_device(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """A host tensor where the accelerator computes, for its current stream: strides as they were, without gaps. On the
    CPU the tensor itself. The host waits for nothing."""
    if not accelerator.asynchronous or tensor.device == accelerator.device:
        return tensor
    made = torch.empty_like(tensor, device=accelerator.device)
    if tensor.numel():
        staged = host_like(accelerator, tensor)
        staged.copy_(tensor)
        made.copy_(staged, non_blocking=True)
    return made


def all_to_device(accelerator: Accelerator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each as by `to_device`."""
    return {name: to_device(accelerator, tensor) for name, tensor in tensors.items()}


def to_host(accelerator: Accelerator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory of what lies on the accelerator, all awaited once; others as they are."""
    readings = {
        name: PendingRead(accelerator, t) if t.device == accelerator.device else t for name, t in tensors.items()
    }
    return {name: r.values() if isinstance(r, PendingRead) else r for name, r in readings.items()}


def host_like(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """Host memory for a tensor's elements that copies reach without waiting, with its strides where it has no gaps."""
    shape = torch.empty_like(tensor, device="meta")
    buffer = accelerator.host_buffer(shape.numel() * shape.element_size())
    return buffer.view(tensor.dtype).as_strided(shape.shape, shape.stride())
