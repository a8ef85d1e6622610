"""Jobs that were handed to a coordinator, in its state folder: `programs/queue.py` decides, and a restart loses none.

Commands reach the coordinator through this folder. A user who may open the folder may give commands; other users may
not. (Rejected: a port for commands. It would need its own protection, and ssh to the coordinator's machine does the
same.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.errors import UserError
from isthmus.locking import claimed
from isthmus.programs.queue import Queue, QueuedJob, State
from isthmus.runtime.identity.database import Database
from isthmus.runtime.identity.keys import fingerprint_in

Kind = Literal["pipeline", "federated"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, kind TEXT NOT NULL, document BLOB NOT NULL,
    directory TEXT NOT NULL, state TEXT NOT NULL, folder TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT '',
    submitted_s REAL NOT NULL, began_s REAL, ended_s REAL, wanted_s REAL NOT NULL, stop INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS job_files (number INTEGER PRIMARY KEY, folder TEXT NOT NULL);
"""
_WISHES = ("", "stop", "stop and resume")  # as the column `stop` counts them
_COLUMNS = """number, name, kind, document, directory, state, folder, detail, submitted_s, began_s, ended_s,
    COALESCE((SELECT job_files.folder FROM job_files WHERE job_files.number = jobs.number), directory)"""


class Submitted(msgspec.Struct, frozen=True):
    """A job that was handed in. Times are seconds since 1970."""

    number: int
    name: str
    kind: Kind
    document: bytes  # the job, as JSON
    directory: str  # from where it was handed in: its runs are written there
    state: State
    folder: str  # the folder of the run; empty before there is one
    detail: str  # why it failed, or what it waits for
    submitted_s: float
    began_s: float | None
    ended_s: float | None
    modules: str = "."  # where the job's own Python modules are

    @property
    def waits(self) -> bool:
        """Whether it is next, and waits for devices."""
        return self.state == "queued" and bool(self.detail)


class JobQueue:
    """Safe to use from several threads and processes."""

    def __init__(self, state_folder: Path) -> None:
        """UserError when the folder cannot hold it."""
        self._database = Database(state_folder / "jobs.sqlite", _SCHEMA, fingerprint_in(state_folder))
        self._claim = state_folder / "jobs.claim"

    def close(self) -> None:
        self._database.close()

    def submit(self, name: str, kind: Kind, document: bytes, directory: Path, file: Path | None = None) -> int:
        """Returns the job's number. Its own modules are beside its `file`."""
        now_s = time.time()
        with self._database.changing() as database:
            cursor = database.execute(
                "INSERT INTO jobs (name, kind, document, directory, state, submitted_s, wanted_s) "
                "VALUES (?, ?, ?, ?, 'queued', ?, ?)",
                (name, kind, document, str(directory), now_s, now_s),
            )
            number = int(cursor.lastrowid or 0)
            database.execute(
                "INSERT OR REPLACE INTO job_files VALUES (?, ?)",
                (number, str((file or directory / "file").absolute().parent)),
            )
            return number

    def jobs(self) -> list[Submitted]:
        """All that were ever handed in, the oldest first."""
        with self._database.reading() as database:
            return [Submitted(*row) for row in database.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY number")]

    def find(self, wanted: str | None, likely: Collection[State] = ("running",)) -> Submitted:
        """Find a job by number or name, the newest of that name; None: the newest that is in a `likely` state, or else
        of all. UserError when there is none."""
        jobs = self.jobs()
        if wanted is None:
            found = [job for job in jobs if job.state in likely or (job.waits and "running" in likely)] or jobs
        else:
            found = [job for job in jobs if wanted in (str(job.number), job.name)]
        if not found:
            raise UserError(f"job: got {wanted or 'none'}, expected the number or name of one; see `isthmus jobs`")
        return found[-1]

    @contextlib.contextmanager
    def _changing(self, number: int | None = None) -> Generator[Queue]:
        """The jobs that wait or run, and this one; what is changed of them is written."""
        with self._database.changing() as database:
            rows = database.execute(
                "SELECT number, state, wanted_s, stop, began_s, ended_s, detail FROM jobs "
                "WHERE state IN ('queued', 'running') OR number = ?",
                (number,),
            ).fetchall()
            before = {
                number: QueuedJob(state, wanted_s, _WISHES[stop], *others)
                for number, state, wanted_s, stop, *others in rows
            }
            queue = Queue(dict(before), time.time())
            yield queue
            for changed, job in queue.jobs.items():
                if job != before[changed]:
                    values = (job.state, job.wanted_s, _WISHES.index(job.wish), job.began_s, job.ended_s, job.detail)
                    database.execute(
                        "UPDATE jobs SET state = ?, wanted_s = ?, stop = ?, began_s = ?, ended_s = ?, detail = ? "
                        "WHERE number = ?",
                        (*values, changed),
                    )

    def begin(self) -> Submitted | None:
        """The one that has waited longest is running from now on."""
        with self._changing() as queue:
            number = queue.begin()
        if number is None:
            return None
        with self._database.reading() as database:
            return Submitted(*database.execute(f"SELECT {_COLUMNS} FROM jobs WHERE number = ?", (number,)).fetchone())

    def waits(self, number: int, devices: Iterable[str]) -> None:
        """The job that begins needs these devices, which are not there."""
        with self._changing() as queue:
            if number in queue.jobs:
                queue.waits(number, devices)

    def begun(self, number: int) -> None:
        """The devices of the job are there."""
        with self._changing() as queue:
            if number in queue.jobs:
                queue.begun(number)

    def runs_in(self, number: int, folder: Path) -> None:
        with self._database.changing() as database:
            database.execute("UPDATE jobs SET folder = ? WHERE number = ?", (str(folder), number))

    def end(self, number: int, state: State, detail: str = "") -> None:
        with self._changing(number) as queue:
            queue.end(number, state, detail[:2000])

    @contextlib.contextmanager
    def served(self) -> Generator[None]:
        """Jobs are run by this process alone meanwhile. What one that was killed ran goes on, before all that wait, but
        for a job that somebody had wanted to stop.
        UserError while another process serves."""
        with claimed(self._claim, f"state folder {self._claim.parent}: another coordinator runs its jobs"):
            with self._changing() as queue:
                queue.restart()
            yield

    def stop(self, number: int) -> None:
        """Take it out of the queue; if it is running, have the coordinator save and end it. UserError when it is
        neither."""
        with self._changing(number) as queue:
            queue.stop(number)

    def stopping(self) -> Submitted | None:
        """The newest job that runs and that somebody wants to stop."""
        with self._database.reading() as database:
            found = f"SELECT {_COLUMNS} FROM jobs WHERE state = 'running' AND stop = ? ORDER BY number DESC LIMIT 1"
            row = database.execute(found, (_WISHES.index("stop"),)).fetchone()
        return None if row is None else Submitted(*row)

    def is_unwanted(self, number: int) -> bool:
        """Return whether somebody wants the job to stop that runs, or waits for devices."""
        with self._database.reading() as database:
            unwanted = "SELECT 1 FROM jobs WHERE number = ? AND (stop OR state = 'stopped')"
            return database.execute(unwanted, (number,)).fetchone() is not None

    def resume(self, number: int) -> None:
        """Have it wait once more; it goes on from where it was. One that is stopping ends first. UserError for one that
        waits, runs, or is done."""
        with self._changing(number) as queue:
            queue.resume(number)


def job_log(state_folder: Path, number: int) -> Path:
    """Return the file with the log of a job of the queue, of all its sessions."""
    return state_folder / "jobs" / f"{number}.log"
