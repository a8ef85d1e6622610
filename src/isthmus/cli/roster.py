"""Who is in a coordinator's fleet: tickets, the devices that joined, and how they leave."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from isthmus.cli.jobs import served_folder
from isthmus.cli.options import notes
from isthmus.errors import UserError, unknown_name
from isthmus.runtime.identity import Member
from isthmus.runtime.service.bulletin import posted
from isthmus.runtime.service.fleet_state import FleetState


def ticket(state: Path | None, count: int) -> None:
    fleet = FleetState(served_folder(state))
    for _ in range(count):
        typer.echo(fleet.ticket())


def devices(state: Path | None, revoke: str | None, out: Console, *, json: bool) -> None:
    fleet = FleetState(served_folder(state))
    if revoke is not None:
        member = fleet.roster.revoke(revoke, time.time())
        notes().print(f"revoked {member.name} ({member.id})", highlight=False)
    members = fleet.roster.members()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(members), indent=1).decode())
    else:
        out.print(_table(members))


def drain(state: Path | None, device: str) -> None:
    fleet = FleetState(served_folder(state))
    names = [member.name for member in fleet.roster.members() if member.revoked_s is None]
    if not names:
        raise UserError(f"device {device!r}: no device has joined this fleet")
    if device not in names:
        raise unknown_name("device", device, names)
    news = posted(fleet.folder)
    if news is None or not news.fresh:
        raise UserError(f"device {device!r}: no coordinator serves this fleet now: start `isthmus serve`")
    if not any(found.name == device and found.working for found in news.devices):
        # The wish would be kept, and take the device out of the next run as soon as that has begun.
        raise UserError(f"device {device!r}: works for no run, so it can be ended at once; see `isthmus status`")
    fleet.drain(device)
    notes().print(f"{device} leaves its run as soon as its part is with others", highlight=False)


def _table(members: list[Member]) -> Table:
    drawn = Table("device", "id", "joined", "last connected", "", title="Devices of the fleet")
    for member in members:
        drawn.add_row(
            member.name, member.id, _when(member.joined_s), _when(member.seen_s),
            f"revoked {_when(member.revoked_s)}" if member.revoked_s is not None else "",
        )  # fmt: skip
    return drawn


def _when(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
