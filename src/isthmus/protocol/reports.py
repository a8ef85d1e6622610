"""Combines the devices' reports of an item."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from isthmus.protocol.finite import Divergence
from isthmus.protocol.run_messages import ItemReported
from isthmus.protocol.work import Item

Reports = Mapping[str, ItemReported]
"""By device."""


class ItemReports:
    """Those of items that not all devices have reported yet."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[str, ItemReported]] = {}

    def add(self, device: str, report: ItemReported, devices: Collection[str]) -> Reports | None:
        """All reports of the item once every device's is here, which are then forgotten; None before."""
        found = self._reports.setdefault(report.item, {})
        found[device] = report
        return self._reports.pop(report.item) if found.keys() >= set(devices) else None

    def missing(self, item: int, devices: Collection[str]) -> frozenset[str]:
        """Who has not reported the item while others have."""
        found = self._reports.get(item)
        return frozenset(devices) - found.keys() if found else frozenset()

    def clear(self) -> None:
        self._reports.clear()


def mean_loss(reports: Reports) -> float | None:
    """Sum of losses over sum of counts; None when no stage of the item has the loss, or nothing was counted."""
    with_loss = [r for r in reports.values() if r.loss is not None]
    count = sum(r.count or 0.0 for r in with_loss)
    return sum(r.loss or 0.0 for r in with_loss) / count if count else None


def non_finite(item: Item, reports: Reports, divergence: Divergence) -> tuple[str, bool]:
    """What to say of an item's numbers, and whether they end the run."""
    found = {device: report.non_finite for device, report in reports.items() if report.non_finite is not None}
    if item.kind == "train":
        return divergence.stepped(item.step, found)
    return divergence.saved(item.step, found) if item.kind == "save" else ("", False)
