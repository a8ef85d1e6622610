"""Leased items and the next ones: the run's items in order, with snapshots between them, and the devices' reports of
each.

Why each sample range enters the model once: a training item's range is a function of its step, an epoch leases the
steps from where it began in order, and states of steps that were done on another line do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest

import msgspec

from isthmus.protocol.finite import Divergence
from isthmus.protocol.recovery import StateLayout
from isthmus.protocol.run_messages import Item, ItemReported, RunSpec, items


class Leases:
    """The items of one plan epoch after another. Indices go on through all of them.

    A snapshot is due `keep_every` steps after the one before, but not before that one is complete: a device holds two
    at most.
    """

    def __init__(self, spec: RunSpec, layout: StateLayout) -> None:
        self._spec = spec
        self._layout = layout
        self._rest: Iterator[Item] = iter(())
        self._peeked: Item | None = None
        self._done: set[tuple[str, int, int]] = {("save", spec.start_step, 0)}
        """Evaluations and checkpoints that need not be done again: kind, step, first sample."""
        self._keep_step = spec.start_step  # the step of the newest snapshot that was leased
        self._waits: set[str] | None = None
        """Devices whose copies of that snapshot are not complete, and "" while not all devices have made theirs."""
        self.acknowledged = -1  # step of the newest complete snapshot; below 0 for none
        self.open: dict[int, Item] = {}
        self.leased = self.finished = 0
        self.begin(spec.start_step, layout, due=False)

    def begin(self, step: int, layout: StateLayout, *, due: bool) -> None:
        """Go on from the state after `step` steps; whatever was open is void."""
        self._layout = layout
        self._rest = items(msgspec.structs.replace(self._spec, start_step=step), due=due)
        self._peeked = None
        self._done = {mark for mark in self._done if mark[1] <= step}
        self.open.clear()
        self.last_step = self._keep_step = step  # steps that are leased, from the run's beginning on
        self._waits = None
        self.acknowledged = min(self.acknowledged, step)
        self._keep_next = due and self.keeps and self.at_period and step < self._spec.steps

    @property
    def keeps(self) -> bool:
        return self._layout.keep_every > 0

    @property
    def at_period(self) -> bool:
        return self.last_step % self._layout.period == 0

    @property
    def exhausted(self) -> bool:
        """Return whether there is nothing left to lease."""
        return self._peek() is None

    @property
    def over(self) -> bool:
        """Return whether the run's last checkpoint is leased."""
        return self.closing and self.last_step == self._spec.steps

    @property
    def closing(self) -> bool:
        """Return whether the newest item is a checkpoint."""
        return bool(self.open) and self.open[max(self.open)].kind == "save"

    def lease(self) -> list[Item]:
        """The next items, until so many are open as the run allows."""
        found: list[Item] = []
        while len(self.open) < self._spec.lease_ahead and (item := self._next()) is not None:
            found.append(self._opened(item))
        return found

    def lease_save(self) -> Item:
        return self._opened(Item(index=0, kind="save", step=self.last_step))

    def _opened(self, item: Item) -> Item:
        item = msgspec.structs.replace(item, index=self.leased)
        self.leased += 1
        self.open[item.index] = item
        if item.kind == "train":
            self.last_step = item.step + 1
            self._keep_next = self._keep_due()
        elif item.kind == "keep":
            self._keep_next, self._keep_step = False, item.step
            self._waits = {"", *self._layout.snapshot_copies}
        return item

    def _keep_due(self) -> bool:
        last, every = self.last_step, self._layout.keep_every
        free = self.keeps and self._waits is None and self.at_period and last < self._spec.steps
        return free and last >= self._keep_step + every

    def _next(self) -> Item | None:
        if self._keep_next:
            return Item(index=0, kind="keep", step=self.last_step)
        found, self._peeked = self._peek(), None
        return found

    def _peek(self) -> Item | None:
        while self._peeked is None:
            item = next(self._rest, None)
            if item is None:
                return None
            if (item.kind, item.step, item.first_sample) not in self._done:
                self._peeked = item
        return self._peeked

    def finish(self, index: int) -> Item:
        """All devices have reported it."""
        item = self.open.pop(index)
        self.finished += 1
        if item.kind in ("eval", "save"):
            self._done.add((item.kind, item.step, item.first_sample))
        return item

    def kept(self, step: int) -> int | None:
        """All devices have made their part of the snapshot. Its step, if it is complete now."""
        return self.snapshot_sources("", step)

    def snapshot_sources(self, of: str, step: int) -> int | None:
        """A device's part has its copy. The snapshot's step, if it is complete now."""
        if self._waits is None or step != self._keep_step:
            return None
        self._waits.discard(of)
        if self._waits:
            return None
        self._waits = None
        self.acknowledged = step
        return step


Reports = Mapping[str, ItemReported]  # the report of each device


class ItemReports:
    """Reports of items that not all devices have reported yet."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[str, ItemReported]] = {}

    def add(self, device: str, report: ItemReported, devices: Collection[str]) -> Reports | None:
        """All reports of the item once every device's is here, which are then forgotten; None before."""
        found = self._reports.setdefault(report.item, {})
        found[device] = report
        return self._reports.pop(report.item) if found.keys() >= set(devices) else None

    def missing(self, item: int, devices: Collection[str]) -> frozenset[str]:
        """Return who has not reported the item while others have."""
        found = self._reports.get(item)
        return frozenset(devices) - found.keys() if found else frozenset()

    def clear(self) -> None:
        self._reports.clear()


def mean_loss(reports: Reports) -> float | None:
    """Sum of losses over sum of counts; None when no stage of the item has the loss, or nothing was counted."""
    with_loss = [r for r in reports.values() if r.loss is not None]
    count = sum(r.count or 0.0 for r in with_loss)
    return sum(r.loss or 0.0 for r in with_loss) / count if count else None


def evaluation_sums(item: Item, reports: Reports) -> tuple[float, ...]:
    """(losses, counts, sums and counts of metrics), added up over the stages with the loss; empty of other items."""
    found = [(r.loss, r.count or 0.0, *r.metrics) for r in reports.values() if r.loss is not None]
    together = zip_longest(*found, fillvalue=0.0)  # a replica without a micro-batch of the item has no metrics
    return tuple(map(sum, together)) if item.kind == "eval" else ()


def non_finite(item: Item, reports: Reports, divergence: Divergence) -> tuple[str, bool]:
    """Return the log line about the numbers of an item that are not finite, and whether they end the run."""
    found = {device: report.non_finite for device, report in reports.items() if report.non_finite is not None}
    if item.kind == "train":
        return divergence.stepped(item.step, found)
    return divergence.saved(item.step, found) if item.kind == "save" else ("", False)
