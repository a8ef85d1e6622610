"""TensorBoard: event files that `tensorboard --logdir` shows."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.extensions import import_extra
from isthmus.trackers.tracker import TrackedRun


class TensorBoardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """TensorBoard: event files that `tensorboard --logdir` shows."""

    folder: str = ""
    """Where event files go, in a folder of the run's name. Empty: into `tensorboard` in the run's folder, so that
    `tensorboard --logdir runs` shows every run."""


class TensorBoardTracker:
    """Scalars by step; settings and events as texts; pictures as images."""

    def __init__(self, options: TensorBoardOptions) -> None:
        self._options = options
        self._writer: Any = None
        self._step = 0

    def start(self, run: TrackedRun) -> None:
        import_extra("tensorboard", "track.to: tensorboard")
        library = import_extra("torch.utils.tensorboard", "track.to: tensorboard")
        chosen = self._options.folder
        folder = Path(chosen) / run.group / run.name if chosen else run.folder / "tensorboard"
        self._writer = library.SummaryWriter(str(folder))
        if not run.resumed:
            lines = json.dumps(dict(run.settings), indent=2).splitlines()
            self._writer.add_text("settings", "\n".join(f"    {line}" for line in lines))  # indented: as it is

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._step = step
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def event(self, step: int, text: str) -> None:
        self._writer.add_text("events", text, step)

    def picture(self, name: str, path: Path) -> None:
        pixels = importlib.import_module("matplotlib.image").imread(path)
        self._writer.add_image(name, pixels[..., :3], self._step, dataformats="HWC")

    def end(self, outcome: str) -> None:
        self._writer.add_text("outcome", outcome, self._step)
        self._writer.close()
