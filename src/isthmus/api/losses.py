"""The losses of a run's folder: also for who wants to know no more than how far it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from isthmus.run_files import LOSSES, LinesFile


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    """Optimizer steps done."""
    loss: float | None
    """None for one that is not a number: JSON has no word for it."""
    split: str = "train"
    metrics: dict[str, float | None] = {}
    """The job's metrics on held-out samples; None for one that counted nothing."""


def losses_file(run: Path) -> LinesFile[LossPoint]:
    return LinesFile(run / LOSSES, LossPoint, "losses")


def losses_in(run: Path, note: Callable[[str], None] = lambda _: None) -> list[LossPoint]:
    """The losses so far, in their order; none where there is no such file. `note` receives lines that cannot be
    read."""
    return losses_file(run).lines(note)
