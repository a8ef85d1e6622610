"""Who is here, what runs, and how far it is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.api.losses import losses_in
from isthmus.documents import read_lines
from isthmus.plans import read_spent
from isthmus.run_files import ROUND_LINES
from isthmus.runtime.service.job_queue import JobQueue, Submitted
from isthmus.runtime.service.status_file import CoordinatorStatus, LinkStatus, read_status
from isthmus.runtime.transport.relay_status import RelayedLink

__all__ = ["LinkStatus", "Progressed", "RelayedLink", "Status", "progressed", "status_of"]


class Progressed(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is, in optimizer steps or federated rounds."""

    job: int
    name: str
    unit: str
    done: int
    of: int
    loss: float | None
    privacy: str = ""
    """What its messages have reported samples, where noise covers them."""


class _Evaluated(msgspec.Struct, frozen=True):
    loss: float | None = None


class _Round(msgspec.Struct, frozen=True):
    """Of a line of `federated/history.py`, the part that is shown here: reading the whole line imports torch."""

    evaluation: _Evaluated | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    coordinator: CoordinatorStatus | None
    """None when none serves the folder."""
    running: Progressed | None
    waiting: tuple[int, ...]
    """Numbers of jobs."""


def status_of(queue: JobQueue, folder: Path) -> Status:
    current_status = read_status(folder)
    jobs = queue.jobs()
    running = next((job for job in jobs if job.state == "running"), None)
    return Status(
        coordinator=current_status if current_status is not None and current_status.fresh else None,
        running=progressed(running) if running is not None else None,
        waiting=tuple(job.number for job in jobs if job.state == "queued"),
    )


def progressed(job: Submitted) -> Progressed:
    """By the run's folder."""
    document: dict[str, dict[str, int]] = msgspec.json.decode(job.document)
    folder = Path(job.folder)
    if job.kind == "federated":
        rounds = read_lines(folder / ROUND_LINES, _Round) if job.folder else []
        evaluated = [line.evaluation.loss for line in rounds if line.evaluation is not None]
        return Progressed(
            job=job.number,
            name=job.name,
            unit="rounds",
            done=len(rounds),
            of=document["federated"]["rounds"],
            loss=evaluated[-1] if evaluated else None,
        )
    points = [p for p in losses_in(folder) if p.split == "train"] if job.folder else []
    spent = read_spent(folder) if job.folder else None
    return Progressed(
        privacy=str(spent) if spent is not None else "",
        job=job.number,
        name=job.name,
        unit="steps",
        done=points[-1].step if points else 0,
        of=document["training"]["steps"],
        loss=points[-1].loss if points else None,
    )
