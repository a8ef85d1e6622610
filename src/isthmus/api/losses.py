"""The losses of a run's folder: also for who wants to know no more than how far it is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.run_files import LOSSES, LinesFile


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    step: int  # optimizer steps done
    loss: float | None  # None for one that is not a number: JSON has no word for it
    split: str = "train"
    metrics: dict[str, float | None] = {}  # the job's metrics on held-out samples; None for one that counted nothing


def losses_file(run: Path) -> LinesFile[LossPoint]:
    return LinesFile(run / LOSSES, LossPoint, "losses")
