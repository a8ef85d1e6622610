"""The devices that are here, what runs, how far it is, and tables of it. Imports neither torch nor what a job needs."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from isthmus.api.run_entries import RunState, run_entries, run_state
from isthmus.disclosure import read_spent
from isthmus.runtime.identity import Member
from isthmus.runtime.service.job_queue import JobQueue, Submitted
from isthmus.runtime.service.status_file import CoordinatorStatus, LinkStatus, read_status
from isthmus.runtime.transport.relay_status import RelayedLink
from isthmus.units import format_duration, format_size


class Progressed(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is, in optimizer steps or federated rounds."""

    job: int
    name: str
    unit: str
    done: int
    of: int
    loss: float | None
    privacy: str = ""  # the privacy that its messages spent, where noise covers them


class Status(msgspec.Struct, frozen=True, kw_only=True):
    coordinator: CoordinatorStatus | None  # None when none serves the folder
    running: Progressed | None
    waiting: tuple[int, ...]  # numbers of jobs


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
    folder = Path(job.folder)
    state = run_state(run_entries(folder)) if job.folder else RunState()
    unit = "round" if job.kind == "federated" else "step"
    spent = read_spent(folder) if job.folder and unit == "step" else None
    return Progressed(
        job=job.number,
        name=job.name,
        unit=f"{unit}s",
        done=state.done,
        of=state.steps or _asked(job.document, unit),
        loss=state.loss,
        privacy=str(spent) if spent is not None else "",
    )


def _asked(document: bytes, unit: str) -> int:
    """Return the steps or rounds of a job that has not begun."""
    tables: dict[str, dict[str, int]] = msgspec.json.decode(document)
    return tables["federated"]["rounds"] if unit == "round" else tables["training"]["steps"]


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


def members_table(members: list[Member]) -> Table:
    drawn = Table("device", "id", "joined", "last connected", "", title="Devices of the fleet")
    for member in members:
        drawn.add_row(
            member.name,
            member.id,
            _when(member.joined_s),
            _when(member.seen_s),
            f"revoked {_when(member.revoked_s)}" if member.revoked_s is not None else "",
        )
    return drawn


def _links(links: tuple[LinkStatus, ...]) -> Table:
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


def status_view(found: Status, jobs: list[Submitted]) -> Group:
    """All of it: devices, links, the job that runs, jobs that wait."""
    parts: list[Table | Text] = []
    current_status = found.coordinator
    if current_status is None:
        parts.append(Text("no coordinator serves this fleet now: `isthmus serve`"))
    else:
        drawn = Table("device", "id", "hardware", "", title=f"Devices here (coordinator on port {current_status.port})")
        for device in current_status.devices:
            drawn.add_row(device.name, device.id, device.hardware, "at work" if device.working else "idle")
        parts.append(drawn)
        if current_status.links:
            parts.append(_links(current_status.links))
        known = {frozenset(link.devices) for link in current_status.links}
        parts += [Text(_told(link)) for link in current_status.relayed if frozenset(link.devices) not in known]
    if (at := found.running) is not None:
        began_s = next((job.began_s for job in jobs if job.number == at.job), None)
        since = f", for {format_duration(time.time() - began_s)}" if began_s is not None else ""
        loss = f", loss {at.loss:.4f}" if at.loss is not None else ""
        parts.append(Text(f"job {at.job} ({at.name}): {at.done} of {at.of} {at.unit}{loss}{since}"))
        if at.privacy:
            parts.append(Text(f"local privacy of its samples: {at.privacy}"))
    if current_status is not None and current_status.awaited:
        parts.append(Text(f"waiting for {', '.join(current_status.awaited)} to join"))
    parts.append(jobs_table([job for job in jobs if job.state in ("queued", "running")]))
    return Group(*parts)
