"""The queue of a coordinator that serves, and who is in its fleet: read and changed by other processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from isthmus.api.states import state_folder
from isthmus.errors import UserError, unknown_name
from isthmus.runtime.identity import Member
from isthmus.runtime.identity.roster import ROSTER
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.service.job_queue import JobQueue, Submitted, job_log
from isthmus.runtime.service.status_file import read_status

LOG_LOOK_S = 0.5
TAIL_LINES = 40


def served_folder(state: Path | None) -> Path:
    """UserError where no fleet was served from it: a folder that was mistyped must not become a fleet."""
    folder = (state or state_folder("fleet")).absolute()
    if not (folder / ROSTER).is_file():
        raise UserError(f"state folder {folder}: no fleet was served from it: start `isthmus serve`")
    return folder


@contextlib.contextmanager
def opened(state: Path | None) -> Generator[tuple[JobQueue, Path]]:
    """The queue of a state folder, and the folder. UserError where no fleet was served from it."""
    folder = served_folder(state)
    queue = JobQueue(folder)
    try:
        yield queue, folder
    finally:
        queue.close()


def submitted_jobs(state: Path | None = None) -> list[Submitted]:
    with opened(state) as (queue, _):
        return queue.jobs()


def stop_job(wanted: str | None = None, state: Path | None = None) -> Submitted:
    """The job, by number or name; by default what runs, or came last. What it leased is finished, a checkpoint saved;
    one that waits is taken out of the queue."""
    with opened(state) as (queue, _):
        job = queue.find(wanted)
        queue.stop(job.number)
        return job


def resume_job(wanted: str | None = None, state: Path | None = None) -> Submitted:
    """The job, which is queued again, once it has ended if it is stopping; by default the one that is stopping, or what
    was stopped or failed last."""
    with opened(state) as (queue, _):
        stopping = queue.stopping() if wanted is None else None
        job = stopping or queue.find(wanted, likely=("stopped", "failed"))
        queue.resume(job.number)
        return job


def job_lines(
    wanted: str | None = None, state: Path | None = None, *, follow: bool = False, tail: int | None = None
) -> Iterator[str]:
    """Yield the job's log, at most its `tail` last lines; with `follow` new lines too, until it ends."""
    with opened(state) as (queue, folder):
        number = queue.find(wanted).number
        path = job_log(folder, number)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        yield "".join(lines if tail is None else lines[-tail:])
        at = sum(len(line.encode()) for line in lines)
        while follow:
            over = queue.find(str(number)).state not in ("queued", "running")
            if path.exists():
                with path.open("rb") as file:
                    file.seek(at)
                    fresh = file.read()
                at += len(fresh)
                yield fresh.decode(errors="replace")
            if over:
                return
            time.sleep(LOG_LOOK_S)


def make_tickets(count: int = 1, state: Path | None = None) -> list[str]:
    """Each lets one device join, once and within 24 hours."""
    fleet = FleetState(served_folder(state))
    return [fleet.ticket() for _ in range(count)]


def fleet_members(state: Path | None = None) -> list[Member]:
    return FleetState(served_folder(state)).roster.members()


def revoke_device(device: str, state: Path | None = None) -> Member:
    """Shut a device out, by its name or id, at once."""
    return FleetState(served_folder(state)).roster.revoke(device, time.time())


def drain_device(device: str, state: Path | None = None) -> None:
    """Have a device leave the run that it works for, as soon as others have its part. UserError for one that works for
    none."""
    fleet = FleetState(served_folder(state))
    names = [member.name for member in fleet.roster.members() if member.revoked_s is None]
    if not names:
        raise UserError(f"device {device!r}: no device has joined this fleet")
    if device not in names:
        raise unknown_name("device", device, names)
    current_status = read_status(fleet.folder)
    if current_status is None or not current_status.fresh:
        raise UserError(f"device {device!r}: no coordinator serves this fleet now: start `isthmus serve`")
    if not any(found.name == device and found.working for found in current_status.devices):
        # The wish would be kept, and take the device out of the next run as soon as that has begun.
        raise UserError(f"device {device!r}: works for no run, so it can be ended at once; see `isthmus status`")
    fleet.drain(device)
