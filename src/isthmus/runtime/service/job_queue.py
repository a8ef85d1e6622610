"""Jobs that were handed to a coordinator, in its state folder: one is run, the others wait, a restart loses none.

    submit ──► queued ──► running ──► done, failed
                 ▲           │
                 │           ├──► stopped          `isthmus stop`
                 └───────────┴──── resume          `isthmus resume`, or a coordinator that is started again

Commands reach the coordinator through this folder. A user who may open the folder may give commands; other users may
not. (Rejected: a port for commands. It would need its own protection, and ssh to the coordinator's machine does the
same.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.errors import UserError
from isthmus.locking import claimed
from isthmus.runtime.identity.authority import fingerprint_in
from isthmus.runtime.identity.database import Database

State = Literal["queued", "running", "done", "failed", "stopped"]
Kind = Literal["pipeline", "federated"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, kind TEXT NOT NULL, document BLOB NOT NULL,
    directory TEXT NOT NULL, state TEXT NOT NULL, folder TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT '',
    submitted_s REAL NOT NULL, began_s REAL, ended_s REAL, wanted_s REAL NOT NULL, stop INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS job_files (number INTEGER PRIMARY KEY, folder TEXT NOT NULL);
"""
_STOP, _STOP_AND_RESUME = 1, 2  # the request to a job that runs: to end; to end and be queued again
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
    detail: str  # why it failed
    submitted_s: float
    began_s: float | None
    ended_s: float | None
    modules: str = "."  # where the job's own Python modules are


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
            found = [job for job in jobs if job.state in likely] or jobs
        else:
            found = [job for job in jobs if wanted in (str(job.number), job.name)]
        if not found:
            raise UserError(f"job: got {wanted or 'none'}, expected the number or name of one; see `isthmus jobs`")
        return found[-1]

    def begin(self) -> Submitted | None:
        """The one that has waited longest is running from now on."""
        with self._database.changing() as database:
            row = database.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE state = 'queued' ORDER BY wanted_s, number LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            number = int(row[0])
            database.execute(
                "UPDATE jobs SET state = 'running', began_s = ?, ended_s = NULL, detail = '', stop = 0 "
                "WHERE number = ?",
                (time.time(), number),
            )
        return msgspec.structs.replace(Submitted(*row), state="running")

    def runs_in(self, number: int, folder: Path) -> None:
        with self._database.changing() as database:
            database.execute("UPDATE jobs SET folder = ? WHERE number = ?", (str(folder), number))

    def end(self, number: int, state: State, detail: str = "") -> None:
        with self._database.changing() as database:
            database.execute(
                "UPDATE jobs SET state = CASE WHEN ?1 = 'stopped' AND stop = ?2 THEN 'queued' ELSE ?1 END, "
                "detail = ?3, ended_s = ?4 WHERE number = ?5",
                (state, _STOP_AND_RESUME, detail[:2000], time.time(), number),
            )

    @contextlib.contextmanager
    def served(self) -> Generator[None]:
        """Jobs are run by this process alone meanwhile. What one that was killed ran goes on, before all that wait, but
        for a job that somebody had wanted to stop.
        UserError while another process serves."""
        with claimed(self._claim, f"state folder {self._claim.parent}: another coordinator runs its jobs"):
            with self._database.changing() as database:
                database.execute("UPDATE jobs SET state = 'stopped' WHERE state = 'running' AND stop = ?", (_STOP,))
                database.execute("UPDATE jobs SET state = 'queued', wanted_s = 0 WHERE state = 'running'")
            yield

    def stop(self, number: int) -> None:
        """Take it out of the queue; if it is running, have the coordinator save and end it. UserError when it is
        neither."""
        with self._database.changing() as database:
            state = _state(database.execute("SELECT state FROM jobs WHERE number = ?", (number,)).fetchone())
            if state == "queued":
                database.execute(
                    "UPDATE jobs SET state = 'stopped', ended_s = ? WHERE number = ?", (time.time(), number)
                )
            elif state == "running":
                database.execute("UPDATE jobs SET stop = ? WHERE number = ?", (_STOP, number))
            else:
                raise UserError(f"job {number}: is {state}, expected a waiting or running job")

    def stopping(self) -> Submitted | None:
        """The newest job that runs and that somebody wants to stop."""
        with self._database.reading() as database:
            found = f"SELECT {_COLUMNS} FROM jobs WHERE state = 'running' AND stop = ? ORDER BY number DESC LIMIT 1"
            row = database.execute(found, (_STOP,)).fetchone()
        return None if row is None else Submitted(*row)

    def is_unwanted(self, number: int) -> bool:
        """Return whether somebody wants the job to stop that is running."""
        with self._database.reading() as database:
            return database.execute("SELECT 1 FROM jobs WHERE number = ? AND stop", (number,)).fetchone() is not None

    def resume(self, number: int) -> None:
        """Have it wait once more; it goes on from where it was. One that is stopping ends first. UserError for one that
        waits, runs, or is done."""
        with self._database.changing() as database:
            stopping = database.execute(
                "UPDATE jobs SET stop = ?, wanted_s = ? WHERE number = ? AND state = 'running' AND stop = ?",
                (_STOP_AND_RESUME, time.time(), number, _STOP),
            )
            if stopping.rowcount:
                return
            state = _state(database.execute("SELECT state FROM jobs WHERE number = ?", (number,)).fetchone())
            if state not in ("stopped", "failed"):
                raise UserError(f"job {number}: is {state}, expected a stopped or failed job")
            database.execute("UPDATE jobs SET state = 'queued', wanted_s = ? WHERE number = ?", (time.time(), number))


def job_log(state_folder: Path, number: int) -> Path:
    """Return the file with the log of a job of the queue, of all its sessions."""
    return state_folder / "jobs" / f"{number}.log"


def _state(row: tuple[str] | None) -> str:
    if row is None:
        raise UserError("job: no job has that number; see `isthmus jobs`")
    return row[0]
