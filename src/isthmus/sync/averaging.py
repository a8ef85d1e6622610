"""Averages over the workers, in place and on the way while the caller computes: of values, of compressed values, and
with how far the workers are apart.

A tensor is scaled by its worker's share before the sum, so that the sum is the weighted mean at once and nothing
is left to do when it arrives. All workers must start the same averages in the same order.

A sum of payloads is no payload, so there is no ring to reduce in: a worker sends K - 1 payloads where it would send
2 (K - 1) / K tensors. What a payload leaves out is added to the next one (`ErrorFeedback`).

How far the workers are apart is Gamma = mean over k of ||mean w - w_k||^2 (DreamDDP, section 3.2). A worker knows the
mean of a layer when it has averaged it, and then no longer what it had before. A sample of at most 2048 elements per
layer is kept meanwhile, so that no second copy of the model is.

Sums over the workers in two hops, where a ring takes 2 (K - 1): between islands every hop is latency.

    worker j    1. sends every other worker its shard of the elements, and adds up the shards of its own that arrive
                2. sends that sum to all

Every worker sends 2 (K - 1) / K of the tensor, as in a ring, but over all its links at once. This is the sharded
parameter server of DT-FM (Eq. 2) on torch's point-to-point messages, in place. A shard is added up by one worker, in
the order of the workers: all end with the same bits, run after run.

A thread takes the sums in turn, so that the caller's backward goes on:

    wire     |1: hop 1|1: hop 2|2: hop 1|2: hop 2|        hop 1 of a sum follows hop 2 of the one before at once
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.sync.exchange import gather
from isthmus.sync.exit_cleanup import TIMEOUT_S, closed, opened
from isthmus.training.compression import DeltaCodec, ErrorFeedback

_TAGS = 1 << 20
LARGEST_BYTES = 1 << 23
"""A larger tensor is summed in pieces: each needs space for what arrives, nearly of its own size."""


class DirectSum:
    """One piece of memory on its way. Not to be touched before `wait` has returned."""

    def __init__(self, tensor: Tensor, share: float, group: dist.ProcessGroup, number: int) -> None:
        self.ended_s = 0.0  # when it was there, on the clock of `time.perf_counter`
        self._tensor, self._share = tensor, share
        self._group = group
        self._rank, workers = dist.get_rank(group), dist.get_world_size(group)
        edges = [tensor.numel() * worker // workers for worker in range(workers + 1)]
        self._shards = [tensor[start:end] for start, end in pairwise(edges)]
        self._others = [worker for worker in range(workers) if worker != self._rank]
        self._tag = 2 * number % _TAGS
        self._parts: list[Tensor] = []
        self._arriving: list[dist.Work] = []
        self._sums: list[dist.Work] = []
        self._sent: list[dist.Work] = []
        self._done = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        """Until the sum is there. Raises what torch.distributed raised on the way."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    @property
    def space_bytes(self) -> int:
        """Bytes that hop 1 brings."""
        return len(self._others) * self._shards[self._rank].nbytes

    def offer(self, space: Tensor) -> None:
        """Say where both hops may put what they bring: hop 1 into `space`, uint8 [at least `space_bytes`].

        Gloo sends nothing before: later it would cost a round trip.
        """
        own = self._shards[self._rank]
        self._parts = list(space[: self.space_bytes].view(own.dtype).view(len(self._others), own.numel()))
        for worker, part in zip(self._others, self._parts, strict=True):
            self._arriving += self._receive(part, worker, 0)
            self._sums += self._receive(self._shards[worker], worker, 1)

    def send_shards(self) -> None:
        """Hop 1."""
        self._tensor.mul_(self._share)
        for worker in self._others:
            self._send(self._shards[worker], worker, 0)

    def send_sum(self) -> None:
        """Hop 2, when hop 1 of all others is here."""
        own = self._shards[self._rank]
        for work in self._arriving:
            work.wait()
        for part in self._parts:
            own.add_(part)
        # A receipt keeps its tensor as well, and this sum may be kept until somebody waits for it.
        self._parts.clear()
        self._arriving.clear()
        for worker in self._others:
            self._send(own, worker, 1)

    def end(self, error: Exception | None = None) -> None:
        """Wait for hop 2 of all others, and let the caller go on."""
        try:
            if error is None:
                for work in (*self._sums, *self._sent):
                    work.wait()
        except Exception as raised:
            error = raised
        self._sums.clear()
        self._sent.clear()
        self._error, self.ended_s = error, time.perf_counter()
        self._done.set()

    def _receive(self, tensor: Tensor, worker: int, hop: int) -> list[dist.Work]:
        if not tensor.numel():
            return []
        work = dist.irecv(tensor, group=self._group, group_src=worker, tag=self._tag + hop)
        assert work is not None, "this process is not in its own group"
        return [work]

    def _send(self, tensor: Tensor, worker: int, hop: int) -> None:
        if tensor.numel():
            work = dist.isend(tensor, group=self._group, group_dst=worker, tag=self._tag + hop)
            assert work is not None, "this process is not in its own group"
            self._sent.append(work)


class DirectSums:
    """The sums of one group in turn. All workers must start the same ones in the same order.

    Several take turns for themselves: `lane` of so many `lanes`, so that nobody takes one's messages for another's.
    """

    def __init__(self, group: dist.ProcessGroup, lane: int = 0, lanes: int = 1) -> None:
        self._group = group
        self._started, self._lanes = lane, lanes
        self._space = [torch.empty(0, dtype=torch.uint8)] * 2
        """For what arrives in turn: allocating it anew each time would leave holes of many megabytes."""
        self._offered = 0
        self._queue: queue.SimpleQueue[DirectSum | None] = queue.SimpleQueue()
        # A daemon: threads that are not are waited for before `leaving` has its turn.
        self._thread = threading.Thread(target=self._run, name="isthmus-sync", daemon=True)
        self._thread.start()

    def start(self, tensor: Tensor, share: float) -> Sequence[DirectSum]:
        """Begin to sum a flat CPU tensor times `share` in place, in one piece or several."""
        found: list[DirectSum] = []
        for piece in tensor.view(-1).split(max(1, LARGEST_BYTES // tensor.element_size())):
            found.append(DirectSum(piece, share, self._group, self._started))
            self._started += self._lanes
            self._queue.put(found[-1])
        return found

    def end(self) -> None:
        """No sum follows: the thread ends after those that were started."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread. Returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def break_off(self) -> None:
        """End every wait in the group, here and at the other workers, with an error.

        Gloo's own `abort` leaves those who wait alone. A wait that runs out closes all connections.
        """
        other = (self._group.rank() + 1) % self._group.size()
        # RuntimeError: that it ran out is what was wanted, and the connections may be closed already.
        with suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], other, _TAGS).wait(timedelta(milliseconds=1))

    def _offer(self, one: DirectSum) -> None:
        turn, self._offered = self._offered % 2, self._offered + 1
        if len(self._space[turn]) < one.space_bytes:
            self._space[turn] = torch.empty(one.space_bytes, dtype=torch.uint8)
        one.offer(self._space[turn])

    @torch.no_grad()
    def _run(self) -> None:
        before: DirectSum | None = None
        now, offered = self._queue.get(), False
        while now is not None:
            following, waiting = None, False
            error: Exception | None = None
            try:
                if not offered:
                    self._offer(now)
                now.send_shards()
                if before is not None:
                    before.end()
                    before = None
                if waiting := not self._queue.empty():
                    following = self._queue.get()
                    if following is not None:
                        self._offer(following)
                now.send_sum()
            except Exception as raised:  # whatever it was, somebody waits for it
                error = raised
                if before is not None:
                    before.end(error)
                    before = None
            if error is None and following is not None:
                before = now
            else:
                now.end(error)
            offered = following is not None
            now = following if waiting else self._queue.get()


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
        """Do the same as `start`, but scaled by `share`, and not counted as sent."""
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
        """Close it when nothing is on the way any more, and nothing will be."""
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
    """The codec's name. It must be the same on all workers, and in a saved state and the run that reads it."""
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
