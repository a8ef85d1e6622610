"""What the devices' reports of an item say together."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.protocol.coordinator_events import Reported
from isthmus.protocol.finite import Divergence
from isthmus.protocol.work import Item

Reports = Mapping[str, Reported]
"""By device."""


def mean_loss(reports: Reports) -> float | None:
    """Sum of losses over sum of counts; None when no stage of the item has the loss, or nothing was counted."""
    told = [r for r in reports.values() if r.loss is not None]
    count = sum(r.count or 0.0 for r in told)
    return sum(r.loss or 0.0 for r in told) / count if count else None


def non_finite(item: Item, reports: Reports, divergence: Divergence) -> tuple[str, bool]:
    """What to say of an item's numbers, and whether they end the run."""
    found = {device: report.non_finite for device, report in reports.items() if report.non_finite is not None}
    if item.kind == "train":
        return divergence.stepped(item.step, found)
    return divergence.saved(item.step, found) if item.kind == "save" else ("", False)
