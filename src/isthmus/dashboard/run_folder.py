"""A run's folder as it is now, read again only where it has changed: runs that work add lines."""

from __future__ import annotations

import os
import time
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from isthmus.api.jobs import opened, served_folder
from isthmus.api.run_entries import ENTRIES, SPANS, LossPoint, RunEntry, RunState, run_state
from isthmus.api.status import status_of
from isthmus.dashboard.rounds import RoundShown
from isthmus.dashboard.spans import LightSpan, SpanTable
from isthmus.documents import check_is_local
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.old_spelling import respelled
from isthmus.plans import Plan
from isthmus.reading import open_file, parse_json, printable, read_json
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
        return self._entries.all()

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


MOST_RUNS = 200  # runs of a list, the newest
DEPTH = ("*", "*/*")  # a sweep's folder holds its runs one folder further down


class Source(Protocol):
    def runs(self) -> dict[str, WatchedRun]:
        """Return the runs by name, the newest first."""
        ...

    def fleet(self) -> dict[str, object] | None:
        """Describe a fleet: its members and its jobs."""
        ...


class FolderSource:
    """A run's folder, or one that holds such folders. UserError for what is none of this machine's folders."""

    def __init__(self, path: Path) -> None:
        try:
            check_is_local("dashboard", str(path))
        except UserError as e:
            reach = "start the page on the machine that has the run, and `ssh -L 7434:127.0.0.1:7434 MACHINE`"
            raise UserError(f"{e}: {reach}") from None
        if not path.is_dir():
            found = "is a file" if path.exists() else "is not there"
            raise UserError(f"{path}: {found}, expected the folder of a run, or a folder of runs")
        self._path = path
        self._known: dict[Path, WatchedRun] = {}

    def runs(self) -> dict[str, WatchedRun]:
        if (self._path / JOB).is_file():
            return {printable(self._path.resolve().name): self._run(self._path)}
        paths = [found.parent for depth in DEPTH for found in self._path.glob(f"{depth}/{JOB}")]
        paths.sort(key=lambda path: -_changed_s(path / JOB))
        return {printable(path.relative_to(self._path)): self._run(path) for path in paths[:MOST_RUNS]}

    def _run(self, path: Path) -> WatchedRun:
        return self._known.setdefault(path, WatchedRun(path))

    def fleet(self) -> dict[str, object] | None:
        return None


def _changed_s(path: Path) -> float:
    """0 of a file that was there a moment ago."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class FleetSource:
    """The runs of a fleet's jobs. UserError where no fleet was served from the state folder."""

    def __init__(self, state: Path | None) -> None:
        self._folder = served_folder(state)
        self._known: dict[str, WatchedRun] = {}

    def runs(self) -> dict[str, WatchedRun]:
        with opened(self._folder) as (queue, _):
            jobs = [job for job in queue.jobs() if job.folder]
        return {
            f"{job.number}-{job.name}": self._known.setdefault(job.folder, WatchedRun(Path(job.folder)))
            for job in reversed(jobs[-MOST_RUNS:])
        }

    def fleet(self) -> dict[str, object]:
        with opened(self._folder) as (queue, folder):
            jobs, found = queue.jobs()[-MOST_RUNS:], status_of(queue, folder)
        kept = ("number", "name", "state", "detail")
        shown = [
            {name: getattr(job, name) for name in kept}
            | {
                "run": f"{job.number}-{job.name}" if job.folder else "",
                "took_s": (job.ended_s or time.time()) - job.began_s if job.began_s else None,
            }
            for job in reversed(jobs)
        ]
        return {"folder": str(folder), "coordinator": found.coordinator, "jobs": shown}
