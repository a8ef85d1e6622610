"""`isthmus serve`, `isthmus ticket` and `isthmus devices`: the coordinator's side of a fleet."""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from isthmus.cli import training
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.runtime.fleet_state import Addresses, FleetState
from isthmus.runtime.identity import Member
from isthmus.runtime.service import Service
from isthmus.units import parse_duration

PORT = 7433
StateOption = Annotated[
    Path | None, typer.Option("--state", help="Folder with the fleet's keys; default ~/.local/state/isthmus/fleet.")
]


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator listens, and how it is reached."""

    host: str
    port: int
    addresses: tuple[str, ...]
    tickets: int
    patience: str


def state_folder(kind: str) -> Path:
    """By convention of the XDG base directories."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "isthmus" / kind


def serve(state: Path | None, serving: Serving, job: Job | None, choices: training.Choices, out: Console) -> int:
    """With a job: until it has run; without: until Ctrl-C. Returns the exit code."""
    notes = Console(stderr=True)

    def say(text: str) -> None:
        notes.print(text, highlight=False, markup=False, soft_wrap=True)

    fleet = FleetState(state or state_folder("fleet"))
    patience_s = parse_duration(serving.patience, "--patience")
    with Service(fleet, serving.host, serving.port, patience_s=patience_s, say=say) as service:
        fleet.listens_at(_addresses(serving, service.port))
        service.start()
        say(f"listening on {serving.host}:{service.port} with TLS; state folder {fleet.folder}")
        for _ in range(serving.tickets):
            typer.echo(fleet.ticket())
        if serving.tickets:
            say("each ticket lets one device join, within 24 hours: `isthmus join` asks for it")
        if job is not None:
            return training.train(job, msgspec.structs.replace(choices, crew=service), out)
        threading.Event().wait()
    return 0


def _addresses(serving: Serving, port: int) -> Addresses:
    """UserError where nobody could tell how the coordinator is reached."""
    if serving.addresses:
        return tuple(_address(text, port) for text in serving.addresses)
    try:
        wildcard = ipaddress.ip_address(serving.host).is_unspecified
    except ValueError:
        wildcard = False
    if wildcard:
        raise UserError(f"--host {serving.host}: tickets need an address that devices can dial: add --address HOST")
    return ((serving.host, port),)


def _address(text: str, port: int) -> tuple[str, int]:
    """HOST, HOST:PORT, or [HOST]:PORT for one with colons."""
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        return text.strip("[]"), port
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise UserError(f"--address {text}: port: got {number!r}, expected a number up to 65535")
    return host.strip("[]"), int(number)


def ticket(state: Path | None, count: int) -> None:
    fleet = FleetState(state or state_folder("fleet"))
    for _ in range(count):
        typer.echo(fleet.ticket())


def devices(state: Path | None, revoke: str | None, out: Console, *, json: bool) -> None:
    fleet = FleetState(state or state_folder("fleet"))
    if revoke is not None:
        member = fleet.roster.revoke(revoke, time.time())
        Console(stderr=True).print(f"revoked {member.name} ({member.id})", highlight=False)
    members = fleet.roster.members()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(members), indent=1).decode())
    else:
        out.print(_table(members))


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
