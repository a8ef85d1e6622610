"""How long an average takes: alpha + beta x bytes, fitted to probes of several sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from isthmus.sync.averaging import Averager
from isthmus.sync.exchange import message_device

SMALLEST_BYTES, GROWTH, MOST_BYTES = 1 << 10, 4, 1 << 22
REPEATS = 3
LONGEST_S = 0.3
"""After a probe that took this long no larger one follows."""


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """An average of `size` bytes among all workers takes `latency_s + size x byte_s`."""

    latency_s: float
    byte_s: float
    """Seconds per byte of the tensor; that 2 (K - 1) / K of it is sent is inside."""

    def average_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.byte_s


def probe(averager: Averager) -> LinkModel:
    """Measure sums of growing sizes. Every worker must take part, and all get the same answer."""
    device = message_device(averager.group)
    points: list[tuple[int, float]] = []
    size_bytes = SMALLEST_BYTES
    _timed(torch.zeros(1, device=device), averager)  # connections are made by the first one
    while True:
        tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)  # whatever torch's default is
        taken_s = statistics.median(_timed(tensor, averager) for _ in range(REPEATS))
        slowest = torch.tensor([taken_s], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=averager.group)
        points.append((size_bytes, float(slowest)))
        if float(slowest) > LONGEST_S or size_bytes >= MOST_BYTES:
            return fitted(points)
        size_bytes *= GROWTH


def fitted(points: Sequence[tuple[int, float]]) -> LinkModel:
    """Least squares of the relative error, neither term negative. `points`: (bytes, seconds), at least two sizes."""
    sizes, times = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    rows = np.stack([1 / times, sizes / times], axis=1)
    latency_s, byte_s = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0].tolist()
    if latency_s < 0:
        latency_s, byte_s = 0.0, float((rows[:, 1] / (rows[:, 1] @ rows[:, 1])).sum())
    elif byte_s < 0:
        latency_s, byte_s = float((rows[:, 0] / (rows[:, 0] @ rows[:, 0])).sum()), 0.0
    return LinkModel(latency_s=latency_s, byte_s=byte_s)


def _timed(tensor: torch.Tensor, averager: Averager) -> float:
    """Seconds of one sum that all workers start together."""
    dist.barrier(averager.group)
    start_s = time.perf_counter()
    averager.sum([tensor]).wait()
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter() - start_s
