"""A run's folder as it is now, read again only where it has changed: runs that work add lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from isthmus.api.losses import LossPoint
from isthmus.api.run_entries import ENTRIES, SPANS, RunEntry
from isthmus.dashboard.rounds import LightRound
from isthmus.dashboard.spans import LightSpan, SpanTable
from isthmus.fleet import Fleet
from isthmus.plans import Plan, PlanPeriod
from isthmus.report.summary import ComparisonSummary
from isthmus.run_files import JOB, LOSSES, ROUND_LINES

Item = TypeVar("Item")
Document = TypeVar("Document")
FOLLOWED = (JOB, ENTRIES, SPANS, LOSSES, ROUND_LINES, "summary.json", "trace.jsonl", "predicted.jsonl", "plans.json")


class Lines(Generic[Item]):
    """A file to which lines are added; read from where it was left, or anew where it was replaced."""

    def __init__(self, path: Path, kind: type[Item]) -> None:
        self._path, self._decoder = path, msgspec.json.Decoder(kind)
        self._at, self._inode = 0, -1
        self.unread = 0
        """Lines that are none."""

    def fresh(self) -> tuple[list[Item], bool]:
        """Whole lines that were added since the last call, and whether those of before are void."""
        try:
            with self._path.open("rb") as file:
                found = self._path.stat()
                replaced = found.st_ino != self._inode or found.st_size < self._at
                self._at = 0 if replaced else self._at
                file.seek(self._at)
                added = file.read()
        except OSError:
            replaced, added = self._inode != -1, b""
            self._at, self._inode = 0, -1
            return [], replaced
        self._inode = found.st_ino
        whole = added[: added.rfind(b"\n") + 1]
        self._at += len(whole)
        return self._decoded(whole), replaced

    def _decoded(self, lines: bytes) -> list[Item]:
        try:
            return self._decoder.decode_lines(lines)
        except ValueError:  # one of them: the others count
            found: list[Item] = []
            for line in lines.splitlines():
                try:
                    found.append(self._decoder.decode(line))
                except ValueError:
                    self.unread += 1
            return found


class _All(Generic[Item]):
    """All lines so far."""

    def __init__(self, path: Path, kind: type[Item]) -> None:
        self._lines, self._found = Lines(path, kind), list[Item]()

    def __call__(self) -> list[Item]:
        added, replaced = self._lines.fresh()
        self._found = [*([] if replaced else self._found), *added] if added or replaced else self._found
        return self._found

    @property
    def unread(self) -> int:
        return self._lines.unread


class WatchedRun:
    """Everything that a page shows of a run; `problem` says why there is nothing to show."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _All(path / ENTRIES, RunEntry)
        self.losses = _All(path / LOSSES, LossPoint)
        self.rounds = _All(path / ROUND_LINES, LightRound)
        self._documents: dict[str, tuple[tuple[int, int], object]] = {}
        self._spans: dict[str, tuple[Lines[LightSpan], SpanTable]] = {}
        self.predictions: dict[str, SpanTable] = {}
        """Of plans that nobody has simulated yet, by their document."""

    def document(self, name: str, kind: type[Document]) -> Document | None:
        """None where it is missing, or cannot be read: `problem` says so of what a run cannot be shown without."""
        try:
            found = (self.path / name).stat()
            stamp = (found.st_ino, found.st_mtime_ns)
            if name not in self._documents or self._documents[name][0] != stamp:
                self._documents[name] = (stamp, msgspec.json.decode((self.path / name).read_bytes(), type=kind))
        except (OSError, ValueError):
            return None
        return self._documents[name][1]  # type: ignore[return-value]  # of the kind that this name always has

    @property
    def job(self) -> dict[str, object]:
        return self.document(JOB, dict[str, object]) or {}

    @property
    def summary(self) -> ComparisonSummary | None:
        return self.document("summary.json", ComparisonSummary)

    @property
    def fleet(self) -> Fleet | None:
        return self.document("fleet.json", Fleet)

    @property
    def first_plan(self) -> Plan | None:
        return self.document("plan.json", Plan)

    @property
    def periods(self) -> tuple[PlanPeriod, ...]:
        """Of a run that is over."""
        return self.document("plans.json", tuple[PlanPeriod, ...]) or ()

    @property
    def problem(self) -> str:
        """Why nothing can be shown; empty where something can."""
        if not self.path.is_dir():
            return "There is no such folder any more."
        if not (self.path / JOB).is_file():
            return (
                "The folder is empty: no run has begun here yet."
                if not any(self.path.iterdir())
                else (f"This is no run: the folder has no {JOB}.")
            )
        if not self.job:
            return f"The run is broken: {JOB} cannot be read."
        missing = [name for name, found in (("fleet.json", self.fleet), ("plan.json", self.first_plan)) if not found]
        if missing and "federated" not in self.job:
            return f"The run is broken: {' and '.join(missing)} cannot be read."
        return ""

    @property
    def unread(self) -> int:
        """Lines that cannot be read."""
        return self.entries.unread + self.losses.unread + self.rounds.unread

    @cached_property
    def _inode(self) -> int:
        return self.path.stat().st_ino

    @property
    def works(self) -> bool | None:
        """Whether a process claims the folder now (`RunFolder.claimed`); None where the system does not say.
        Rejected: to try the lock, which for a moment would keep a run from beginning."""
        try:
            locks = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return None
        return any("FLOCK" in line and line.split()[-3].endswith(f":{self._inode}") for line in locks)

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Differs once there is something new."""
        found: list[tuple[int, int]] = [(int(bool(self.works)), 0)]
        for name in FOLLOWED:
            try:
                stat = (self.path / name).stat()
                found.append((stat.st_size, stat.st_mtime_ns))
            except OSError:
                found.append((-1, -1))
        return tuple(found)

    def measured(self) -> SpanTable:
        """The newest session's trace: the finished one, or as far as it is."""
        name = "trace.jsonl" if (self.path / "trace.jsonl").is_file() else SPANS
        return self._table(name)

    def predicted(self, plan: Plan, simulate: Callable[[], SpanTable]) -> SpanTable:
        """As the run's end wrote it, or of this plan as the simulator says."""
        if (self.path / "predicted.jsonl").is_file():
            return self._table("predicted.jsonl")
        key = msgspec.json.encode(plan).decode()
        if key not in self.predictions:
            self.predictions[key] = simulate()
        return self.predictions[key]

    def _table(self, name: str) -> SpanTable:
        lines, table = self._spans.setdefault(name, (Lines(self.path / name, LightSpan), SpanTable()))
        added, replaced = lines.fresh()
        if replaced:
            table.clear()
        table.add(added)
        return table
