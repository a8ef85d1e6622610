"""A worker's computation stretched by sleeping, so that it does not depend on how many cores this machine has.

Every module with parameters lasts its share of the step, by its floating-point operations: the forward sleeps after its
output, the backward before its gradients, so that a listener for gradients sees them when they would be due.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(ctx.backward_s)
        return gradients[0], None


def stretch(model: nn.Module, work: dict[str, float], compute_s: float) -> None:
    """A third of `compute_s` goes to the forward, the rest to the backward; `work` from `work_of`."""
    whole = sum(work.values())
    for name, module in model.named_modules():
        if name in work:
            share_s = compute_s * work[name] / whole
            module.register_forward_hook(_slowed(share_s / 3, share_s * 2 / 3))


def _slowed(forward_s: float, backward_s: float) -> Any:
    def hook(_: nn.Module, __: object, output: Tensor) -> Tensor:
        time.sleep(forward_s)
        return _Slow.apply(output, backward_s)  # pyright: ignore[reportReturnType]

    return hook


def work_of(model: nn.Module, run: Any) -> dict[str, float]:
    """Multiplications of each linear or convolutional module, seen while `run()` runs the model."""
    found: dict[str, float] = {}

    def counting(name: str, weight: Tensor) -> Any:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            found[name] = weight.numel() * output.numel() / weight.shape[0]

        return hook

    handles = [
        module.register_forward_hook(counting(name, module.weight))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return found
