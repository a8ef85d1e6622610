"""`isthmus jobs`, `stop`, `resume` and `logs`: what a coordinator that serves is to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from isthmus.cli.options import state_folder
from isthmus.errors import UserError
from isthmus.runtime.identity.roster import ROSTER
from isthmus.runtime.service.job_queue import JobQueue, Submitted, job_log
from isthmus.units import format_duration

LOOK_S = 0.5
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


def jobs(state: Path | None, out: Console, *, json: bool) -> None:
    with opened(state) as (queue, _):
        found = queue.jobs()
    if json:
        told = [{k: v for k, v in msgspec.to_builtins(job).items() if k != "document"} for job in found]
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
    else:
        out.print(jobs_table(found))


def jobs_table(found: list[Submitted]) -> Table:
    drawn = Table("job", "name", "state", "submitted", "took", "run folder", title="Jobs")
    for job in found:
        state = f"{job.state}: {job.detail}" if job.detail else job.state
        drawn.add_row(str(job.number), job.name, state, _when(job.submitted_s), _took(job), job.folder)
    return drawn


def _when(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


def _took(job: Submitted) -> str:
    """Its last session."""
    if job.began_s is None or job.state == "queued":
        return ""
    return format_duration((job.ended_s or time.time()) - job.began_s)


def stop(state: Path | None, wanted: str | None, out: Console) -> None:
    with opened(state) as (queue, _):
        job = queue.find(wanted)
        queue.stop(job.number)
        how = "saves and ends" if job.state == "running" else "is taken out of the queue"
        out.print(f"job {job.number} ({job.name}) {how}; `isthmus resume {job.number}` goes on", highlight=False)


def resume(state: Path | None, wanted: str | None, out: Console) -> None:
    with opened(state) as (queue, _):
        job = queue.find(wanted, likely=("stopped", "failed"))
        queue.resume(job.number)
        out.print(f"job {job.number} ({job.name}) is queued: it goes on from where it was", highlight=False)


def logs(state: Path | None, wanted: str | None, *, follow: bool, everything: bool) -> None:
    """What the job said, on stdout; with `follow` what it says, until it ends."""
    with opened(state) as (queue, folder):
        number = queue.find(wanted).number
        path = job_log(folder, number)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        typer.echo("".join(lines if everything else lines[-TAIL_LINES:]), nl=False)
        at = sum(len(line.encode()) for line in lines)
        while follow:
            over = queue.find(str(number)).state not in ("queued", "running")
            if path.exists():
                with path.open("rb") as file:
                    file.seek(at)
                    fresh = file.read()
                at += len(fresh)
                typer.echo(fresh.decode(errors="replace"), nl=False)
            if over:
                return
            time.sleep(LOOK_S)
