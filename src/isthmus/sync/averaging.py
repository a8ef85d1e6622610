"""Averages over the workers, in place and on the way while the caller computes: of values, of compressed values, and
with how far the workers are apart.

A tensor is scaled by its worker's share before the sum, so that the sum is the weighted mean at once and nothing
is left to do when it arrives. All workers must start the same averages in the same order.

A sum of payloads is no payload, so there is no ring to reduce in: a worker sends K - 1 payloads where it would send
2 (K - 1) / K tensors. What a payload leaves out is added to the next one (`ErrorFeedback`).

How far the workers are apart is Gamma = mean over k of ||mean w - w_k||^2 (DreamDDP, section 3.2). A worker knows the
mean of a layer when it has averaged it, and then no longer what it had before. A sample of at most 2048 elements per
layer is kept meanwhile, so that no second copy of the model is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.sync.direct import DirectSum, DirectSums
from isthmus.sync.exchange import gather
from isthmus.sync.exit_cleanup import TIMEOUT_S, closed, opened
from isthmus.training.compression import DeltaCodec, ErrorFeedback

_BROKEN_OFF_S = 5.0  # until what was broken off has ended: no more than a wake-up, on a machine that may be busy


class Averager:
    """Weighted averages in a process group of their own: on Gloo so many at once as there are lanes, each in turn."""

    def __init__(self, group: dist.ProcessGroup, weight: float, lanes: int = 1) -> None:
        self.group = group
        self.workers = dist.get_world_size(group)
        self.lanes = lanes
        self.sent_bytes = 0  # bytes that this worker sent in a ring: 2 (K - 1) / K of every tensor
        self.busy_s = 0.0
        """How long averages were on the way, overlapping ones counted once. 0 but for CPU tensors on Gloo."""
        self._through_s = 0.0
        self._weights = gather(weight, float, group)
        self._rank = dist.get_rank(group)
        self.shares = [one / sum(self._weights) for one in self._weights]  # every worker's part of an average
        self._others: list[dist.Work] = []
        self._lanes: list[DirectSums] = []
        if self.workers > 1 and dist.get_backend(group) == "gloo":
            self._lanes = [DirectSums(group, lane, lanes) for lane in range(lanes)]
            opened(self)

    def count_steps(self, steps: Sequence[int]) -> None:
        """From now on workers count by their weights times their steps in a period. All must do so together."""
        parts = [weight * count for weight, count in zip(self._weights, steps, strict=True)]
        self.shares = [part / sum(parts) for part in parts]

    @torch.no_grad()
    def start(self, tensors: Sequence[Tensor], lane: int = 0) -> PendingAverage:
        """Begin to average contiguous tensors in place: they may not be touched before `PendingAverage.wait`."""
        if self.workers > 1:
            self.sent_bytes += sum(2 * (self.workers - 1) * tensor.nbytes // self.workers for tensor in tensors)
        return self.sum(tensors, self.shares[self._rank], lane)

    @torch.no_grad()
    def sum(self, tensors: Sequence[Tensor], share: float = 1.0, lane: int = 0) -> PendingAverage:
        """As `start`, but scaled by `share`, and not counted as sent."""
        pending = PendingAverage(self)
        for tensor in tensors:
            if self._lanes and tensor.device.type == "cpu":
                pending.add(*self._lanes[lane].start(tensor, share))
            elif self.workers > 1:
                work = dist.all_reduce(tensor.mul_(share), group=self.group, async_op=True)
                assert work is not None, "this process is not in its own group"
                pending.add(work)
        return pending

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average in place, and wait for it."""
        self.start(tensors).wait()

    def watch(self, work: dist.Work) -> None:
        """Something else is on its way in the group, which `leave` must not leave behind either."""
        self._others = [one for one in self._others if not one.is_completed()]
        self._others.append(work)

    def close(self) -> None:
        """When nothing is on the way any more, and nothing will be."""
        self.leave(TIMEOUT_S)

    def leave(self, timeout_s: float) -> None:
        """Send and receive no more. What is on the way has so long to arrive, and is broken off then."""
        closed(self)
        for lane in self._lanes:
            lane.end()
        if self._lanes and not self._ended(timeout_s):
            self._lanes[0].break_off()
            self._ended(_BROKEN_OFF_S)
        self._lanes = []

    def _ended(self, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        ended = [lane.join(max(0.0, until_s - time.monotonic())) for lane in self._lanes]
        for work in self._others:
            left = timedelta(seconds=max(1e-3, until_s - time.monotonic()))
            with suppress(RuntimeError):  # it ran out of time, or its group is broken: then it has ended as well
                work.wait(left)
        return all(ended) and all(work.is_completed() for work in self._others)

    def took(self, started_s: float, ended_s: float) -> None:
        """Count a time in which something was on the way."""
        self.busy_s += max(0.0, ended_s - max(started_s, self._through_s))
        self._through_s = max(self._through_s, ended_s)


class PendingAverage:
    def __init__(self, averager: Averager) -> None:
        self._averager = averager
        self._started_s = time.perf_counter()
        self._works: list[dist.Work | DirectSum] = []

    def add(self, *works: dist.Work | DirectSum) -> None:
        self._works += works

    def wait(self) -> None:
        """Until the averages are there. May be called again."""
        for work in self._works:
            work.wait()
        ended_s = [work.ended_s for work in self._works if isinstance(work, DirectSum)]
        if ended_s:
            self._averager.took(self._started_s, max(ended_s))
        self._works.clear()


def codec_name(codec: DeltaCodec | None) -> str:
    """Return the codec's name, which must be alike between workers, and between a saved state and the run that reads
    it."""
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


SAMPLED = 2048


def sample(flat: Tensor) -> Tensor:
    """Some of its elements, always the same ones; all of a small tensor's."""
    return flat.clone() if len(flat) <= SAMPLED else flat.index_select(0, _places(len(flat)).to(flat.device))


@cache
def _places(elements: int) -> Tensor:
    # Random, not every n-th: a stride may follow a matrix's columns.
    return torch.randint(elements, (SAMPLED,), generator=torch.Generator().manual_seed(elements))


class MeasuredAverage:
    """An average on its way, and how far this worker is from it."""

    def __init__(self, averager: Averager | CompressedAverager, flats: Sequence[Tensor]) -> None:
        self._flats = flats
        self._before = [sample(flat) for flat in flats]
        self._pending = averager.start(flats)

    def wait(self) -> float:
        """Until it is there. Returns ||mean - own||^2, estimated from the samples."""
        self._pending.wait()
        return sum(
            float((sample(flat) - before).double().square().mean()) * len(flat)
            for flat, before in zip(self._flats, self._before, strict=True)
            if len(flat)
        )
