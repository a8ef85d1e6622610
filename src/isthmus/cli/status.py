"""`isthmus status`: who is here, what runs, and how far it is."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from isthmus.api.losses import losses_in
from isthmus.cli.jobs import jobs_table, opened
from isthmus.documents import read_lines
from isthmus.plans import read_spent
from isthmus.runtime.service.bulletin import Bulletin, LinkNews, posted
from isthmus.runtime.service.job_queue import JobQueue, Submitted
from isthmus.runtime.transport.relayed import RelayedLink
from isthmus.units import format_duration, format_size

REFRESH_S = 1.0


class Progressed(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is, in optimizer steps or federated rounds."""

    job: int
    name: str
    unit: str
    done: int
    of: int
    loss: float | None
    privacy: str = ""
    """What its messages have told of samples, where noise covers them."""


class _Evaluated(msgspec.Struct, frozen=True):
    loss: float | None = None


class _Round(msgspec.Struct, frozen=True):
    """Of a line of `federated/history.py`, what is told here: the whole line is for who has imported torch."""

    evaluation: _Evaluated | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    coordinator: Bulletin | None
    """None when none serves the folder."""
    running: Progressed | None
    waiting: tuple[int, ...]
    """Numbers of jobs."""


def status(state: Path | None, out: Console, *, json: bool, once: bool) -> None:
    """On a terminal it is drawn anew every second, until Ctrl-C."""
    with opened(state) as (queue, folder):
        if json:
            found = msgspec.json.encode(_status(queue, folder))
            typer.echo(msgspec.json.format(found, indent=1).decode())
        elif once or not out.is_terminal:
            out.print(_drawn(_status(queue, folder), queue))
        else:
            _live(queue, folder, out)


def _live(queue: JobQueue, folder: Path, out: Console) -> None:
    with Live(console=out, auto_refresh=False) as live:
        while True:
            live.update(_drawn(_status(queue, folder), queue), refresh=True)
            time.sleep(REFRESH_S)


def _status(queue: JobQueue, folder: Path) -> Status:
    news = posted(folder)
    jobs = queue.jobs()
    running = next((job for job in jobs if job.state == "running"), None)
    return Status(
        coordinator=news if news is not None and news.fresh else None,
        running=progressed(running) if running is not None else None,
        waiting=tuple(job.number for job in jobs if job.state == "queued"),
    )


def progressed(job: Submitted) -> Progressed:
    """By the run's folder."""
    document: dict[str, dict[str, int]] = msgspec.json.decode(job.document)
    folder = Path(job.folder)
    if job.kind == "federated":
        rounds = read_lines(folder / "rounds.jsonl", _Round) if job.folder else []
        evaluated = [line.evaluation.loss for line in rounds if line.evaluation is not None]
        return Progressed(
            job=job.number, name=job.name, unit="rounds", done=len(rounds), of=document["federated"]["rounds"],
            loss=evaluated[-1] if evaluated else None,
        )  # fmt: skip
    points = [p for p in losses_in(folder) if p.split == "train"] if job.folder else []
    spent = read_spent(folder) if job.folder else None
    return Progressed(
        privacy=str(spent) if spent is not None else "",
        job=job.number, name=job.name, unit="steps", done=points[-1].step if points else 0,
        of=document["training"]["steps"], loss=points[-1].loss if points else None,
    )  # fmt: skip


def _links(links: tuple[LinkNews, ...]) -> Table:
    drawn = Table("link", "", "latency", "streams", "cost", title="Links in use")
    for link in links:
        latency = f"{format_duration(link.latency_s)} each way" if link.latency_s is not None else "not known"
        carried = format_size(link.carried_bytes)
        cost = f"{carried} into the coordinator's line, and out again" if link.relayed else "none beside its own"
        way = "relayed by the coordinator" if link.relayed else "direct"
        streams = f"{link.streams}, BBR" if link.bbr else str(link.streams)
        drawn.add_row(" - ".join(link.devices), way, latency, streams, cost)
    return drawn


def _told(link: RelayedLink) -> str:
    first, second = link.devices
    latency = f", {format_duration(link.latency_s)} each way" if link.latency_s is not None else ""
    carried = format_size(link.carried_bytes)
    return f"relayed: {first} - {second}, {carried} carried{latency}; `isthmus probe` says how fast it is"


def _drawn(found: Status, queue: JobQueue) -> Group:
    parts: list[Table | Text] = []
    news = found.coordinator
    if news is None:
        parts.append(Text("no coordinator serves this fleet now: `isthmus serve`"))
    else:
        drawn = Table("device", "id", "hardware", "", title=f"Devices here (coordinator on port {news.port})")
        for device in news.devices:
            drawn.add_row(device.name, device.id, device.hardware, "at work" if device.working else "idle")
        parts.append(drawn)
        if news.links:
            parts.append(_links(news.links))
        known = {frozenset(link.devices) for link in news.links}
        parts += [Text(_told(link)) for link in news.relayed if frozenset(link.devices) not in known]
    jobs = queue.jobs()
    if (at := found.running) is not None:
        began_s = next((job.began_s for job in jobs if job.number == at.job), None)
        since = f", for {format_duration(time.time() - began_s)}" if began_s is not None else ""
        loss = f", loss {at.loss:.4f}" if at.loss is not None else ""
        parts.append(Text(f"job {at.job} ({at.name}): {at.done} of {at.of} {at.unit}{loss}{since}"))
        if at.privacy:
            parts.append(Text(f"local privacy of its samples: {at.privacy}"))
    if news is not None and news.awaited:
        parts.append(Text(f"waiting for {', '.join(news.awaited)} to join"))
    parts.append(jobs_table([job for job in jobs if job.state in ("queued", "running")]))
    return Group(*parts)
