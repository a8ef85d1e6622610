"""Averages of compressed tensors: every worker's payload goes to all others, each decodes them all and takes the mean.

A sum of payloads is no payload, so there is no ring to reduce in: a worker sends K - 1 payloads where it would send
2 (K - 1) / K tensors. What a payload leaves out is added to the next one (`ErrorFeedback`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.sync.averaging import Averager
from isthmus.training.compression import DeltaCodec, ErrorFeedback


def codec_name(codec: DeltaCodec | None) -> str:
    """What must be alike between workers, and between a saved state and who reads it."""
    kind = type(codec)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(codec)  # object's names an address


class CompressedAverager:
    """Averages of the same tensors, again and again, with a memory of what was left out of each.

    `decay` is the share of it that comes later: the rest is forgotten (SparseLoCo, arXiv 2508.15706, Algorithm 1).
    """

    def __init__(self, averager: Averager, codec: DeltaCodec, decay: float = 1.0) -> None:
        self._averager = averager
        self._feedback = ErrorFeedback(codec, decay)

    @torch.no_grad()
    def start(self, tensors: Sequence[Tensor]) -> CompressedPendingAverage:
        """Begin to average; the tensors get their averages in `wait`."""
        gathered: list[tuple[Tensor, list[Tensor], dist.Work]] = []
        for number, tensor in enumerate(tensors):
            payload = self._feedback.encode(number, tensor, f"delta {number}")
            everyone = [torch.empty_like(payload) for _ in range(self._averager.workers)]
            work = dist.all_gather(everyone, payload, group=self._averager.group, async_op=True)
            assert work is not None, "this process is not in its own group"
            self._averager.watch(work)
            gathered.append((tensor, everyone, work))
            self._averager.sent_bytes += (self._averager.workers - 1) * payload.nbytes
        return CompressedPendingAverage(self._averager.shares, self._feedback.codec, gathered)

    def state(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.error.{number}": error for number, error in self._feedback.state().items()}

    def load(self, state: Mapping[str, Tensor], prefix: str) -> None:
        count = sum(name.startswith(f"{prefix}.error.") for name in state)
        self._feedback.load({number: state[f"{prefix}.error.{number}"].clone() for number in range(count)})


class CompressedPendingAverage:
    """Payloads on their way."""

    def __init__(
        self, shares: Sequence[float], codec: DeltaCodec, gathered: list[tuple[Tensor, list[Tensor], dist.Work]]
    ) -> None:
        self._shares = shares
        self._codec = codec
        self._gathered = gathered

    @torch.no_grad()
    def wait(self) -> None:
        """Until the averages are in their tensors. May be called again."""
        for tensor, everyone, work in self._gathered:
            work.wait()
            tensor.zero_()
            for rank, (share, payload) in enumerate(zip(self._shares, everyone, strict=True)):
                decoded = self._codec.decode(payload, tensor.shape, tensor.dtype, f"delta of worker {rank}")
                tensor.add_(decoded, alpha=share)
        self._gathered = []
