"""How fast this machine's CPU, or an accelerator of it, computes: in the matrix products of a job's model, or without a
model in Sky Computing's benchmark, a stack of ten convolutions of 256 channels, kernel 3, forward and backward; the
batch and the images are smaller where theirs (32, 64 x 64) would take minutes; and what it could do at best, in a
product of two large matrices: the two are FusionLLM's S and S*, and their ratio is lambda.

`python -m isthmus.runtime.service.speed THREADS ACCELERATOR` reads products from standard input and prints JSON.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import nn

from isthmus.accelerators import Accelerator, open_accelerator
from isthmus.runtime.messages.probe import Product
from isthmus.runtime.processes.memory_limit import machine_memory_bytes

LAYERS, CHANNELS, KERNEL = 10, 256, 3
SIDES = (8, 16, 32, 64)
LEAST_S = 0.5
"""A pass that takes this long is long enough to time."""
MATRIX_SIDES = (256, 512, 1024, 2048, 4096, 8192, 16384)
LEAST_PRODUCT_S = 0.1
"""Nothing but the product is timed: that takes less to be told."""
COPIED_BYTES = 1 << 26
PASSES = 3
HALF = torch.bfloat16


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """FLOP/s and bytes/s, as in `Computes`."""

    flops_per_s: float
    peak_flops_per_s: float
    half_flops_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    memory_bytes: int


def conv_flops(side: int, batch: int = 1) -> int:
    """Of one pass: forward, and twice as much backward (but for the first layer's input, which needs no gradient)."""
    forward = 2 * batch * CHANNELS * CHANNELS * KERNEL * KERNEL * side * side
    return forward * (3 * LAYERS - 1)


def seconds(accelerator: Accelerator, act: Callable[[], object], passes: int = PASSES) -> float:
    """Of the fastest of some passes, by the hardware's own clock, after one that is not counted."""
    found: list[float] = []
    for _ in range(1 + passes):
        begun = accelerator.record(timed=True)
        act()
        ended = accelerator.record(timed=True)
        ended.synchronize()
        found.append(begun.seconds_to(ended))
    return max(min(found[1:]), 1e-9)


def measure(accelerator: Accelerator, products: Sequence[Product]) -> Measured:
    """Sustained speed in fp32, and on an accelerator in bf16 where it has that; the peak is of the same products in
    fp32."""
    asynchronous = accelerator.asynchronous
    sustained = measure_products if products else measure_convolutions
    flops_per_s = sustained(accelerator, torch.float32, products)
    half_flops_per_s = 0.0
    if asynchronous:  # a CPU's bf16 is computed by other kernels from one to the next machine: runs tell its speed
        with contextlib.suppress(RuntimeError):
            half_flops_per_s = sustained(accelerator, HALF, products)
    found = accelerator.memory()
    return Measured(
        flops_per_s=flops_per_s, peak_flops_per_s=max(flops_per_s, measure_peak(accelerator)),
        half_flops_per_s=half_flops_per_s, host_bytes_per_s=measure_copies(accelerator) if asynchronous else 0.0,
        memory_bytes=found.free + found.reserved if asynchronous else machine_memory_bytes(),
    )  # fmt: skip


def measure_convolutions(accelerator: Accelerator, dtype: torch.dtype, _: Sequence[Product] = ()) -> float:
    """FLOP/s in passes of the largest size that is needed, the best of all sizes."""
    layers = [nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1) for _ in range(LAYERS)]
    stack = nn.Sequential(*layers).to(accelerator.device, dtype)
    best = 0.0
    for side in SIDES:
        images = torch.randn(1, CHANNELS, side, side).to(accelerator.device, dtype)
        taken_s = seconds(accelerator, lambda images=images: stack(images).square().mean().backward())
        best = max(best, conv_flops(side) / taken_s)
        if taken_s >= LEAST_S:
            break
    return best


def measure_products(accelerator: Accelerator, dtype: torch.dtype, products: Sequence[Product]) -> float:
    """FLOP/s in a model's products, each as often as the model has it."""
    taken_s = 0.0
    for product in products:
        a = torch.randn(product.batch, product.m, product.k).to(accelerator.device, dtype)
        b = torch.randn(product.batch, product.k, product.n).to(accelerator.device, dtype)
        taken_s += product.count * seconds(accelerator, lambda a=a, b=b: torch.bmm(a, b))
    return sum(product.flops for product in products) / taken_s


def measure_peak(accelerator: Accelerator) -> float:
    """FLOP/s of products of square matrices, up to the first that is long enough."""
    best = 0.0
    for side in MATRIX_SIDES:
        try:
            a, b = (torch.randn(side, side).to(accelerator.device) for _ in range(2))
            taken_s = seconds(accelerator, lambda a=a, b=b: torch.mm(a, b))
        except torch.OutOfMemoryError:  # others may have much of it
            break
        best = max(best, 2 * side**3 / taken_s)
        if taken_s >= LEAST_PRODUCT_S:
            break
    return best


def measure_copies(accelerator: Accelerator) -> float:
    """Bytes/s between the accelerator and buffers of the host that copies reach without waiting, the slower way."""
    here = accelerator.host_buffer(COPIED_BYTES)
    here.zero_()
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=accelerator.device)
    up_s = seconds(accelerator, lambda: there.copy_(here, non_blocking=True))
    down_s = seconds(accelerator, lambda: here.copy_(there, non_blocking=True))
    return COPIED_BYTES / max(up_s, down_s)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    wanted = msgspec.json.decode(sys.stdin.buffer.read() or b"[]", type=tuple[Product, ...])
    sys.stdout.buffer.write(msgspec.json.encode(measure(open_accelerator(sys.argv[2]), wanted)))
