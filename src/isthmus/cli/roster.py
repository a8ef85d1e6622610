"""Who is in a coordinator's fleet: tickets, the devices that joined, and how they leave."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from isthmus.cli.options import notes, state_folder
from isthmus.errors import unknown_name
from isthmus.runtime.identity import Member
from isthmus.runtime.service.fleet_state import FleetState


def ticket(state: Path | None, count: int) -> None:
    fleet = FleetState(state or state_folder("fleet"))
    for _ in range(count):
        typer.echo(fleet.ticket())


def devices(state: Path | None, revoke: str | None, out: Console, *, json: bool) -> None:
    fleet = FleetState(state or state_folder("fleet"))
    if revoke is not None:
        member = fleet.roster.revoke(revoke, time.time())
        notes().print(f"revoked {member.name} ({member.id})", highlight=False)
    members = fleet.roster.members()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(members), indent=1).decode())
    else:
        out.print(_table(members))


def drain(state: Path | None, device: str) -> None:
    fleet = FleetState(state or state_folder("fleet"))
    names = [member.name for member in fleet.roster.members() if member.revoked_s is None]
    if device not in names:
        raise unknown_name("device", device, names)
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
