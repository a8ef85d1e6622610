"""Losses and counts of an item's micro-batches: on the device that computed them until somebody asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import PendingRead


class _Begun(NamedTuple):
    micro_batches: int
    losses: PendingRead
    counts: PendingRead | None


class LossAccumulator:
    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self._begun: _Begun | None = None

    def add(self, loss: Tensor, count: Tensor | None) -> None:
        """Add a micro-batch. Without a count it is one. A loss [1 + n] has n sums and counts of metrics after it."""
        # A copy: the loss may be a view of all that it was computed from.
        self._pending.append((loss.detach().clone(), None if count is None else count.detach().clone()))

    @property
    def last(self) -> Tensor:
        return self._pending[-1][0]

    def begin(self) -> None:
        """Start to copy the losses so far to the host: a later read may find that they have arrived."""
        if self._pending and (self._begun is None or self._begun.micro_batches < len(self._pending)):
            counts = [count for _, count in self._pending if count is not None]
            self._begun = _Begun(
                len(self._pending),
                PendingRead(self._accelerator, torch.stack([loss for loss, _ in self._pending])),
                PendingRead(self._accelerator, torch.stack(counts)) if counts else None,
            )

    def sums(self) -> tuple[float, float]:
        """Return the sums of losses and of counts, added up in order."""
        loss, count, *_ = self._all()
        return loss, count

    def _all(self) -> tuple[float, ...]:
        self.begin()
        if self._begun is None:
            return 0.0, 0.0
        found = [loss.reshape(-1).tolist() for loss in self._begun.losses.values()]
        losses, *metrics = map(sum, zip(*found, strict=True))
        counts = self._begun.counts
        return losses, float(len(found)) if counts is None else sum(float(c) for c in counts.values()), *metrics

    def take(self) -> tuple[float, float]:
        """The sums, which it forgets."""
        loss, count, *_ = self.take_all()
        return loss, count

    def take_all(self) -> tuple[float, ...]:
        """(losses, counts, sums and counts of metrics), which it forgets."""
        found = self._all()
        self._pending, self._begun = [], None
        return found
