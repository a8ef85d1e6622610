"""How fast this machine computes, without a model: Sky Computing's benchmark, a stack of ten convolutions of 256
channels, kernel 3, forward and backward; the batch and the images are smaller where theirs (32, 64 x 64) would take
minutes; and what it could do at best, in a product of two large matrices: the two are FusionLLM's S and S*, and their
ratio is lambda. `python -m isthmus.runtime.service.speed THREADS` prints JSON."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

from isthmus.runtime.processes.memory_limit import machine_memory_bytes

LAYERS, CHANNELS, KERNEL = 10, 256, 3
SIDES = (8, 16, 32, 64)
LEAST_S = 0.5
"""A pass that takes this long is long enough to time."""
MATRIX_SIDES = (256, 512, 1024, 2048, 4096)
LEAST_PRODUCT_S = 0.1
"""Nothing but the product is timed: that takes less to be told."""


def conv_flops(side: int, batch: int = 1) -> int:
    """Of one pass: forward, and twice as much backward (but for the first layer's input, which needs no gradient)."""
    forward = 2 * batch * CHANNELS * CHANNELS * KERNEL * KERNEL * side * side
    return forward * (3 * LAYERS - 1)


def measure_speed() -> float:
    """Sustained FLOP/s of this process: the best of three passes of the largest size that is needed."""
    stack = nn.Sequential(*[nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1) for _ in range(LAYERS)])
    best = 0.0
    for side in SIDES:
        images = torch.randn(1, CHANNELS, side, side)
        taken_s = [_pass_s(stack, images) for _ in range(3)]
        best = max(best, conv_flops(side) / min(taken_s))
        if min(taken_s) >= LEAST_S:
            break
    return best


def measure_peak() -> float:
    """FLOP/s of products of square matrices: the best of three of each size, up to the first that is long enough."""
    best = 0.0
    for side in MATRIX_SIDES:
        a, b = torch.randn(side, side), torch.randn(side, side)
        taken_s = [_product_s(a, b) for _ in range(3)]
        best = max(best, 2 * side**3 / min(taken_s))
        if min(taken_s) >= LEAST_PRODUCT_S:
            break
    return best


def _product_s(a: torch.Tensor, b: torch.Tensor) -> float:
    began_s = time.monotonic()
    torch.mm(a, b)
    return time.monotonic() - began_s


def _pass_s(stack: nn.Module, images: torch.Tensor) -> float:
    began_s = time.monotonic()
    stack(images).square().mean().backward()
    return time.monotonic() - began_s


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    told = {"peak_flops_per_s": measure_peak(), "flops_per_s": measure_speed(), "memory_bytes": machine_memory_bytes()}
    print(json.dumps(told))
