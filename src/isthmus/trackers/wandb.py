"""Weights & Biases, online or into a folder that `wandb sync` uploads later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from isthmus.extensions import import_extra
from isthmus.trackers.tracker import TrackedRun


class WandbOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Weights & Biases, online, or offline into files that `wandb sync` uploads.

    The key of an account comes from `wandb login` or WANDB_API_KEY, never from a job."""

    mode: Literal["online", "offline", "shared", "disabled", ""] = ""  # Empty: as WANDB_MODE says, else `online`.
    entity: str = ""  # User or team; empty: the account's own.
    tags: tuple[str, ...] = ()  # Tags of the run.
    folder: str = ""  # Where its files go; empty: the run's folder.


class WandbTracker:
    """Figures over an axis `step` of their own: W&B refuses a step that comes again after a loss of devices."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options
        self._library: Any = None
        self._run: Any = None
        self._events = 0

    def start(self, run: TrackedRun) -> None:
        said = self._options
        if said.mode in ("offline", "disabled"):
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._library = library = import_extra("wandb", "track.to: wandb")
        self._run = library.init(
            project=run.project,
            entity=said.entity or None,
            group=run.group or None,
            name=run.name,
            id=run.id,
            resume="allow",
            config=dict(run.settings),
            tags=said.tags or None,
            dir=said.folder or str(run.folder),
            mode=said.mode or None,
            # stdout is data, and what a device measures of itself is in the figures already
            settings=library.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def event(self, step: int, text: str) -> None:
        self._events += 1
        self._run.summary[f"event.{self._events}"] = f"step {step}: {text}"

    def picture(self, name: str, path: Path) -> None:
        self._run.log({f"pictures/{name}": self._library.Image(str(path))})

    def end(self, outcome: str) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome in ("done", "stopped", "interrupted") else 1)
