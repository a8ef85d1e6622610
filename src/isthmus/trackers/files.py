"""Figures as files that anything reads: CSV, and JSON lines."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import msgspec

from isthmus.trackers.tracker import TrackedRun


class CsvFileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """CSV: one row per figure, with the columns `step`, `name` and `value`."""

    file: str = ""  # Empty: `figures.csv` in the run's folder.


class JsonLinesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """JSON lines: one object per step, or event."""

    file: str = ""  # Empty: `figures.jsonl` in the run's folder.


class CsvFileTracker:
    """Rows are added: a resumed run goes on in the same file. Settings, events and pictures have no place there."""

    def __init__(self, options: CsvFileOptions) -> None:
        self._options = options
        self._path = Path()

    def start(self, run: TrackedRun) -> None:
        self._path = Path(self._options.file or run.folder / "figures.csv")
        if not self._path.exists():
            self._add([("step", "name", "value")])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._add([(step, name, value) for name, value in figures.items()])

    def event(self, step: int, text: str) -> None:
        """Their number is a figure, `faults`."""

    def picture(self, name: str, path: Path) -> None:
        """It has no place there."""

    def end(self, outcome: str) -> None:
        """Every row is written."""

    def _add(self, rows: list[tuple[int | str, str, float | str]]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)


class JsonLinesTracker:
    """Lines `{"step": 3, "loss": 0.5}`, `{"step": 3, "event": "..."}`, and at the ends settings and the outcome."""

    def __init__(self, options: JsonLinesOptions) -> None:
        self._options = options
        self._path = Path()

    def start(self, run: TrackedRun) -> None:
        self._path = Path(self._options.file or run.folder / "figures.jsonl")
        self._add({"run": run.name, "group": run.group, "resumed": run.resumed, "settings": dict(run.settings)})

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._add({"step": step, **figures})

    def event(self, step: int, text: str) -> None:
        self._add({"step": step, "event": text})

    def picture(self, name: str, path: Path) -> None:
        """It has no place there."""

    def end(self, outcome: str) -> None:
        self._add({"outcome": outcome})

    def _add(self, line: dict[str, object]) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
