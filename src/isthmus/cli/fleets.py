"""What commands of a fleet print. It imports neither torch nor what a job needs."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from isthmus.api import jobs
from isthmus.api.jobs import Member, Submitted
from isthmus.api.status import LinkStatus, RelayedLink, Status, status_of
from isthmus.cli.options import notes, out, print_json
from isthmus.units import format_duration, format_size

REFRESH_S = 1.0


def show_jobs(state: Path | None, *, json: bool) -> None:
    found = jobs.submitted_jobs(state)
    if json:
        print_json([{k: v for k, v in msgspec.to_builtins(job).items() if k != "document"} for job in found])
    else:
        out().print(jobs_table(found))


def show_logs(state: Path | None, wanted: str | None, *, follow: bool, everything: bool) -> None:
    for text in jobs.job_lines(wanted, state, follow=follow, tail=None if everything else jobs.TAIL_LINES):
        typer.echo(text, nl=False)


def stop(state: Path | None, wanted: str | None) -> None:
    job = jobs.stop_job(wanted, state)
    how = "saves and ends" if job.state == "running" else "is taken out of the queue"
    _log(f"job {job.number} ({job.name}) {how}; `isthmus resume {job.number}` goes on")


def resume(state: Path | None, wanted: str | None) -> None:
    job = jobs.resume_job(wanted, state)
    _log(f"job {job.number} ({job.name}) is queued: it goes on from where it was")


def show_tickets(state: Path | None, count: int) -> None:
    for ticket in jobs.make_tickets(count, state):
        typer.echo(ticket)


def show_devices(state: Path | None, revoke: str | None, *, json: bool) -> None:
    if revoke is not None:
        member = jobs.revoke_device(revoke, state)
        _log(f"revoked {member.name} ({member.id})")
    members = jobs.fleet_members(state)
    if json:
        print_json(members)
    else:
        out().print(_table(members))


def drain(state: Path | None, device: str) -> None:
    jobs.drain_device(device, state)
    _log(f"{device} leaves its run as soon as its part is with others")


def show_status(state: Path | None, *, json: bool, once: bool) -> None:
    """On a terminal it is drawn anew every second, until Ctrl-C."""
    shown = out()
    with jobs.opened(state) as (queue, folder):
        if json:
            print_json(status_of(queue, folder))
        elif once or not shown.is_terminal:
            shown.print(_drawn(status_of(queue, folder), queue.jobs()))
        else:
            with Live(console=shown, auto_refresh=False) as live:
                while True:
                    live.update(_drawn(status_of(queue, folder), queue.jobs()), refresh=True)
                    time.sleep(REFRESH_S)


def _log(text: str) -> None:
    notes().print(text, highlight=False)


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


def _table(members: list[Member]) -> Table:
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


def _drawn(found: Status, jobs: list[Submitted]) -> Group:
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
