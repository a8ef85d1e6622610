"""What the devices' reports of an item say together."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.protocol.coordinator_events import Reported


def mean_loss(reports: Iterable[Reported]) -> float | None:
    """Sum of losses over sum of counts; None when no stage of the item has the loss, or nothing was counted."""
    told = [r for r in reports if r.loss is not None]
    count = sum(r.count or 0.0 for r in told)
    return sum(r.loss or 0.0 for r in told) / count if count else None
