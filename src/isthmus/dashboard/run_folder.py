"""A run's folder as it is now, read again only where it has changed: runs that work add lines."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from isthmus.api.losses import LossPoint
from isthmus.api.run_entries import ENTRIES, SPANS, RunEntry, RunState, run_entries, run_state
from isthmus.dashboard.rounds import RoundShown
from isthmus.dashboard.spans import LightSpan, SpanTable
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.old_spelling import respelled
from isthmus.plans import Plan
from isthmus.reading import open_file, parse_json, read_json
from isthmus.report.summary import ComparisonSummary
from isthmus.run_files import CLIENT_NAMES, JOB, LOSSES, ROUND_LINES, read_job

Item = TypeVar("Item")
Document = TypeVar("Document")
FLEET, PLAN, SUMMARY, PRIVACY = "fleet.json", "plan.json", "summary.json", "privacy.json"
MEASURED, PREDICTED = "trace.jsonl", "predicted.jsonl"
FOLLOWED = (JOB, ENTRIES, SPANS, LOSSES, ROUND_LINES, MEASURED, PREDICTED, SUMMARY)


class GrowingFile(Generic[Item]):
    """A file to which lines are added; read from where it was left, or anew where it was replaced."""

    def __init__(self, path: Path, kind: type[Item]) -> None:
        self._path, self._kind, self._decoder = path, kind, msgspec.json.Decoder(kind)
        self._at, self._inode = 0, -1
        self._found: list[Item] = []
        self.unread = 0  # lines that are none

    def fresh(self) -> tuple[list[Item], bool]:
        """Whole lines that were added since the last call, and whether those of before are void."""
        try:
            with open_file(self._path) as file:
                found = os.fstat(file.fileno())
                replaced = found.st_ino != self._inode or found.st_size < self._at
                self._at, self._inode = 0 if replaced else self._at, found.st_ino
                file.seek(self._at)
                added = file.read()
        except OSError:
            replaced, self._at, self._inode = self._inode != -1, 0, -1
            return [], replaced
        whole = added[: added.rfind(b"\n") + 1]
        self._at += len(whole)
        return self._decoded(whole), replaced

    def all(self) -> list[Item]:
        """Every line so far."""
        added, replaced = self.fresh()
        self._found = added if replaced else self._found + added if added else self._found
        return self._found

    def _decoded(self, lines: bytes) -> list[Item]:
        try:
            return self._decoder.decode_lines(lines)
        except (ValueError, RecursionError):  # of one of them: the others count
            found: list[Item] = []
            for line in lines.splitlines():
                try:
                    found.append(parse_json(line, self._kind, ""))
                except UserError:
                    self.unread += 1
            return found


class _Operator(msgspec.Struct):
    name: str
    module: str = ""


class _Graph(msgspec.Struct):
    ops: list[_Operator] = []


class WatchedRun:
    """All that a page shows of a run; `problem` says why there is nothing to show."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = GrowingFile(path / ENTRIES, RunEntry)
        self._losses = GrowingFile(path / LOSSES, LossPoint)
        self._rounds = GrowingFile(path / ROUND_LINES, RoundShown)
        self._known: tuple[list[RunEntry], RunState] | None = None
        """The entries that were read last, and how far the run was then."""
        self._documents: dict[str, tuple[tuple[int, int], object]] = {}
        self._spans: dict[str, tuple[GrowingFile[LightSpan], SpanTable]] = {}

    @property
    def client_names(self) -> list[str]:
        """Those of a federated run's clients, in the order of their numbers; empty where the data do not name them."""
        return self.document(CLIENT_NAMES, list[str]) or []

    @property
    def entries(self) -> list[RunEntry]:
        return self._entries.all() or self._before

    @cached_property
    def _before(self) -> list[RunEntry]:
        """Those of a federated run of a version that wrote none."""
        return run_entries(self.path)

    @property
    def state(self) -> RunState:
        entries = self.entries
        if self._known is None or self._known[0] is not entries:
            self._known = entries, run_state(entries)
        return self._known[1]

    @property
    def losses(self) -> list[LossPoint]:
        return self._losses.all()

    @property
    def rounds(self) -> list[RoundShown]:
        return self._rounds.all()

    @property
    def unread(self) -> int:
        """Lines that cannot be read."""
        return self._entries.unread + self._losses.unread + self._rounds.unread

    def document(self, name: str, kind: type[Document]) -> Document | None:
        """None where it is missing, or cannot be read: `problem` says so of what a run cannot be shown without."""
        try:
            found = (self.path / name).stat()
            stamp = (found.st_ino, found.st_mtime_ns)
            if name not in self._documents or self._documents[name][0] != stamp:
                self._documents[name] = (
                    stamp,
                    read_job(self.path, kind) if name == JOB else read_json(self.path / name, kind),
                )
        except (OSError, UserError):
            return None
        return self._documents[name][1]  # type: ignore[return-value]  # of the kind that this name always has

    @property
    def modules(self) -> dict[str, str]:
        graph = self.document("graph.json", _Graph)
        return {op.name: op.module for op in graph.ops if op.module} if graph else {}

    @property
    def job(self) -> dict[str, object]:
        return respelled(self.document(JOB, dict[str, object]) or {}, JOB)

    @property
    def summary(self) -> ComparisonSummary | None:
        return self.document(SUMMARY, ComparisonSummary)

    @property
    def fleet(self) -> Fleet | None:
        return self.document(FLEET, Fleet)

    @property
    def problem(self) -> str:
        """Return why nothing can be shown; empty where something can."""
        try:
            there = self.path.is_dir() and os.listdir(self.path)
        except OSError as e:
            return f"The folder cannot be read: {e.strerror}."
        if there is False:
            return "There is no such folder any more."
        if not (self.path / JOB).is_file():
            if there:
                return f"This is no run: the folder has no {JOB}."
            return "The folder is empty: no run has begun here yet."
        needed = {JOB: self.job}
        if self.state.planned:
            needed |= {FLEET: self.fleet, PLAN: self.document(PLAN, Plan)}
        missing = [name for name, found in needed.items() if not found]
        return f"The run is broken: {' and '.join(missing)} cannot be read." if missing else ""

    @cached_property
    def _inode(self) -> int:
        return self.path.stat().st_ino

    @property
    def works(self) -> bool | None:
        """Return whether a process claims the folder now (`RunFolder.claimed`); None where the system does not say.
        Rejected: to try the lock, which for a moment would keep a run from beginning."""
        try:
            locks = Path("/proc/locks").read_text().splitlines()
            return any("FLOCK" in line and line.split()[-3].endswith(f":{self._inode}") for line in locks)
        except OSError:
            return None

    def stamp(self) -> tuple[object, ...]:
        """Differs once there is something new."""
        found: list[object] = [self.works]
        for name in FOLLOWED:
            try:
                stat = (self.path / name).stat()
                found.append((stat.st_size, stat.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)

    def measured(self) -> SpanTable:
        """The newest session's trace: the finished one, or as far as it is."""
        return self._table(MEASURED if (self.path / MEASURED).is_file() else SPANS)

    def predicted(self) -> SpanTable | None:
        """Return the prediction as the run's end wrote it; None before."""
        return self._table(PREDICTED) if (self.path / PREDICTED).is_file() else None

    def _table(self, name: str) -> SpanTable:
        file, table = self._spans.setdefault(name, (GrowingFile(self.path / name, LightSpan), SpanTable()))
        added, replaced = file.fresh()
        if replaced:
            table.clear()
        table.add(added)
        return table
