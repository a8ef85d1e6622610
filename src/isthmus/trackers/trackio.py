"""Trackio: a database on this machine that `trackio show` shows, or a Hugging Face Space."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.extensions import import_extra
from isthmus.trackers.tracker import TrackedRun

PRINT = ("trackio", "trackio.run", "trackio.utils")
"""Modules that print to stdout, which is data here. Who redirected it in a thread would redirect it for all."""


class TrackioOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Trackio: a database that `trackio show` shows. It is where TRACKIO_DIR says."""

    space: str = ""  # A Hugging Face Space in place of this machine's database.


class TrackioTracker:
    """Figures by step; events as alerts; pictures as images."""

    def __init__(self, options: TrackioOptions) -> None:
        self._options = options
        self._library: Any = None
        self._run: Any = None
        self._step = 0

    def start(self, run: TrackedRun) -> None:
        self._library = import_extra("trackio", "track.to: trackio")
        for module in PRINT:
            vars(importlib.import_module(module))["print"] = _nothing
        self._run = self._library.init(
            project=run.project,
            name=f"{run.name}-{run.id[:6]}",  # a run is known by its name alone, and folders are named alike
            group=run.group or None,
            space_id=self._options.space or None,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(figures), step=step)

    def event(self, step: int, text: str) -> None:
        self._run.alert(title=f"step {step}", text=text, level=self._library.AlertLevel.WARN, step=step)

    def picture(self, name: str, path: Path) -> None:
        self._run.log({f"pictures/{name}": self._library.Image(str(path))}, step=self._step)

    def end(self, outcome: str) -> None:
        self._run.alert(title="the run ended", text=outcome, level=self._library.AlertLevel.INFO, step=self._step)
        self._run.finish()


def _nothing(*_: object, **__: object) -> None: ...
