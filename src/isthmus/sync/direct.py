"""Sums over the workers in two hops, where a ring takes 2 (K - 1): between islands every hop is latency.

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
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

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
