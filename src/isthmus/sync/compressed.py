"""Averages of compressed tensors: every worker's payload goes to all others, each decodes them all and takes the mean.

A sum of payloads is no payload, so there is no ring to reduce in: a worker sends K - 1 payloads where it would send
2 (K - 1) / K tensors. What a payload leaves out is added to the next one (error feedback, Seide et al. 2014), which is
sound because deltas are summands of one sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.sync.averaging import Averager


class DeltaCodec(Protocol):
    """A way to pack a tensor into bytes whose number depends on its shape and type alone."""

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        """The payload, uint8 [bytes]."""
        ...

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        """A new tensor. Raises PeerError for bytes that `encode` does not write."""
        ...


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
        self._codec = codec
        self._decay = decay
        self._errors: list[Tensor] = []

    @torch.no_grad()
    def start(self, tensors: Sequence[Tensor]) -> CompressedPendingAverage:
        """Begin to average; the tensors get their averages in `wait`."""
        if not self._errors:
            self._errors = [torch.zeros_like(tensor) for tensor in tensors]
        gathered: list[tuple[Tensor, list[Tensor], dist.Work]] = []
        for number, (tensor, error) in enumerate(zip(tensors, self._errors, strict=True)):
            error.add_(tensor)
            payload = self._codec.encode(error, f"delta {number}")
            error.sub_(self._codec.decode(payload, error.shape, error.dtype, f"delta {number}")).mul_(self._decay)
            everyone = [torch.empty_like(payload) for _ in range(self._averager.workers)]
            work = dist.all_gather(everyone, payload, group=self._averager.group, async_op=True)
            assert work is not None, "this process is not in its own group"
            self._averager.watch(work)
            gathered.append((tensor, everyone, work))
            self._averager.sent_bytes += (self._averager.workers - 1) * payload.nbytes
        return CompressedPendingAverage(self._averager.shares, self._codec, gathered)

    def state(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.error.{number}": error for number, error in enumerate(self._errors)}

    def load(self, state: Mapping[str, Tensor], prefix: str) -> None:
        count = sum(name.startswith(f"{prefix}.error.") for name in state)
        self._errors = [state[f"{prefix}.error.{number}"].clone() for number in range(count)]


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
