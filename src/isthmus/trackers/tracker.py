"""The protocol of trackers, to which each library is adapted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

import msgspec


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as trackers get it at its start."""

    name: str  # the name of its folder
    project: str
    group: str  # runs of one sweep have the same; empty: none
    id: str  # 32 hexadecimal digits, the same in every session of the run
    resumed: bool  # whether an earlier session has called `start` with this id
    folder: Path  # the run's folder, an absolute path
    settings: Mapping[str, str | int | float | bool]  # the job: "training.steps" and so on


class Tracker(Protocol):
    """One run's way into a tracker. Made for a run, used by one thread of the coordinator's process.

    Every method may be slow and may raise: the run goes on, and the tracker gets nothing more.
    """

    def start(self, run: TrackedRun) -> None:
        """The first call."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """After so many steps or rounds. Names are as `loss`, `step_s`, `busy/DEVICE`. A step may come again after a
        loss of devices."""

    def event(self, step: int, text: str) -> None:
        """A device was lost, another plan is in force, ..."""

    def picture(self, name: str, path: Path) -> None:
        """A PNG file: `plan`, `timeline`, `loss`, ..."""

    def end(self, outcome: str) -> None:
        """The last call. Returns when everything is written."""


def flat(settings: Mapping[str, object], path: str = "") -> dict[str, str | int | float | bool]:
    """Keys of inner tables and places in lists joined by dots. Values that are none are left out.

    >>> flat({"training": {"steps": 3, "clip_norm": None}, "optimizer": [{"lr": 0.1}]})
    {'training.steps': 3, 'optimizer.0.lr': 0.1}
    """
    return dict(_items(settings, path))


def _items(value: object, path: str) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            yield from _items(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(cast("list[object]", value)):
            yield from _items(inner, f"{path}.{place}")
    elif isinstance(value, str | int | float):
        yield path, value
