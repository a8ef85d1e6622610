"""Averages over the workers, in place and on the way while the caller computes.

A tensor is scaled by its worker's share before the all-reduce, so that the sum is the weighted mean at once and nothing
is left to do when it arrives. All workers must start the same averages in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.sync.exchange import gather


class Averager:
    """Weighted averages in a process group of their own."""

    def __init__(self, group: dist.ProcessGroup, weight: float) -> None:
        self.group = group
        self.workers = dist.get_world_size(group)
        self.sent_bytes = 0
        """What this worker sent in a ring: 2 (K - 1) / K of every tensor."""
        self.busy_s = 0.0
        """How long averages were on the way, overlapping ones counted once. On Gloo only: 0 elsewhere."""
        self._through_s = 0.0
        self._timed = dist.get_backend(group) == "gloo"
        self._weights = gather(weight, float, group)
        self._rank = dist.get_rank(group)
        self.shares = [one / sum(self._weights) for one in self._weights]
        """Every worker's part of an average."""

    def count_steps(self, steps: Sequence[int]) -> None:
        """From now on workers count by their weights times their steps in a period. All must do so together."""
        parts = [weight * count for weight, count in zip(self._weights, steps, strict=True)]
        self.shares = [part / sum(parts) for part in parts]

    @torch.no_grad()
    def start(self, tensors: Sequence[Tensor]) -> Pending:
        """Begin to average contiguous tensors in place: they may not be touched before `Pending.wait`."""
        pending = Pending(self)
        for tensor in tensors:
            if self.workers > 1:
                tensor.mul_(self.shares[self._rank])
                work = dist.all_reduce(tensor, group=self.group, async_op=True)
                assert work is not None, "this process is not in its own group"
                pending.add(work, timed=self._timed)
                self.sent_bytes += 2 * (self.workers - 1) * tensor.nbytes // self.workers
        return pending

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average in place, and wait for it."""
        self.start(tensors).wait()

    def took(self, started_s: float, ended_s: float) -> None:
        """Count a time in which something was on the way."""
        self.busy_s += max(0.0, ended_s - max(started_s, self._through_s))
        self._through_s = max(self._through_s, ended_s)


class Pending:
    """Averages on their way."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager
        self._started_s = time.perf_counter()
        self._ended_s = self._started_s
        self._works: list[dist.Work] = []
        self._marks: list[torch.futures.Future[None]] = []

    def add(self, work: dist.Work, *, timed: bool) -> None:
        self._works.append(work)
        if timed:
            # A plain callback may run only after `wait` has returned; what follows a future can be waited for.
            self._marks.append(work.get_future().then(self._done))

    def wait(self) -> None:
        """Until the averages are there. May be called again."""
        for work in self._works:
            work.wait()
        for mark in self._marks:
            mark.wait()
        if self._works:
            self._averager.took(self._started_s, self._ended_s)
        self._works.clear()
        self._marks.clear()

    def _done(self, _: object) -> None:
        self._ended_s = max(self._ended_s, time.perf_counter())
