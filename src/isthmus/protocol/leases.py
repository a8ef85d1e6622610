"""Leased items and the next ones: the run's items in order, with snapshots between them, and the devices' reports of
each.

Why each sample range enters the model once: a training item's range is a function of its step, an epoch leases the
steps from where it began in order, and states of steps that were done on another line do not count. Figures of the
reports are compared with what the run can have, before the coordinator takes a report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest

import msgspec

from isthmus.protocol.finite import Divergence
from isthmus.protocol.recovery import StateHolding, StateLayout
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReport,
    Inventory,
    Item,
    ItemReported,
    RunSpec,
    SnapshotCopied,
    StateReceived,
    TransferEnded,
    items,
)
from isthmus.protocol.run_ports import EpochStart
from isthmus.session.program import OutOfPhase


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
        while self._peeked is None or (self._peeked.kind == "save" and self._saves(self._peeked.step)):
            self._peeked = item = next(self._rest, None)
            if item is None:
                return None
            if (item.kind, item.step, item.first_sample) in self._done:
                self._peeked = None
        return self._peeked

    def finish(self, index: int) -> Item:
        """All devices have reported it."""
        item = self.open.pop(index)
        self.finished += 1
        if item.kind in ("eval", "save"):
            self._done.add((item.kind, item.step, item.first_sample))
        return item

    def lease_save_again(self, item: Item) -> list[Item]:
        """The save was finished, and there is no checkpoint: the save of the steps that are leased now, unless it is
        open."""
        self._done.discard((item.kind, item.step, item.first_sample))
        return [] if self._saves(self.last_step) else [self.lease_save()]

    def _saves(self, step: int) -> bool:
        """Return whether a checkpoint of this step is under way."""
        return any(item.kind == "save" and item.step == step for item in self.open.values())

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


class ReportChecks:
    """Checks reports to one coordinator. It is notified in order of what the run does."""

    def __init__(self, spec: RunSpec, epoch: int, steps: int) -> None:
        """`epoch`: of the coordinator's first plan, in which devices can have done so many steps yet."""
        self._spec = spec
        self._first_epoch = epoch
        self._epoch = epoch
        self._most_steps = {epoch: steps}
        """Steps that a device can have done in each epoch at most, from the run's beginning on."""
        self._transfer = (0, 0)  # number and first step of the newest state transfer

    def began(self, begun: EpochStart) -> None:
        self._epoch = begun.epoch
        self._most_steps[begun.epoch] = begun.step

    def opened(self, item: Item) -> None:
        if item.kind == "train":
            self._most_steps[self._epoch] = item.step + 1

    def transfers(self, number: int, step: int) -> None:
        """A state transfer begins."""
        self._transfer = number, step

    def check(self, body: DeviceReport, devices: int) -> None:
        """OutOfPhase for a figure that no device of the run can have; `devices` are
        how many stages the plan has."""
        most = self._most_steps.get(body.epoch, -1)
        number, first = self._transfer
        match body:
            case Inventory(holdings=holdings):
                self.check_held(holdings)
            case SnapshotCopied(step=step):
                _check("copied the snapshot of step", step, 0, most)
            case StateReceived(step=step) if body.number == number:
                _check("received the state of step", step, first, max(step, first))  # its donor says how many are done
            case StateReceived() | TransferEnded():
                _check("took part in state transfer", body.number, 1, number)
            case DeviceFailed(failure=failure) if failure is not None:
                _check("failed in step", failure.step, -1, most)
            case ItemReported(non_finite=found) if found is not None:
                _check("found numbers that are not finite in stage", found.stage, -1, devices - 1)
                _check("found numbers that are not finite in micro-batch", found.micro_batch, -1, self._micro_batches)
            case _:
                pass

    @property
    def _micro_batches(self) -> int:
        return self._spec.micro_batches - 1

    def check_held(self, holdings: Iterable[StateHolding]) -> None:
        """Raise OutOfPhase for a state that no device can hold. Only the run's last step is known of a coordinator
        before this one."""
        for held in holdings:
            before = held.epoch < self._first_epoch
            most = self._spec.steps if before else self._most_steps.get(held.epoch, -1)
            _check(f"holds the state of epoch {held.epoch} after step", held.step, 0, most)


def _check(what: str, got: int, least: int, most: int) -> None:
    if not least <= got <= most:
        expected = f"expected {least} to {most}" if least <= most else "expected none"
        raise OutOfPhase(f"{what} {got}, {expected}")
