"""Which runs the page shows: one folder, the folders of a folder, or those of a fleet's jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from isthmus.api.jobs import opened, served_folder
from isthmus.api.status import status_of
from isthmus.dashboard.run_folder import WatchedRun
from isthmus.documents import check_is_local
from isthmus.errors import UserError
from isthmus.reading import printable
from isthmus.run_files import JOB

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
