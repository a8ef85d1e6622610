"""`isthmus join` and `isthmus doctor`: a device's side of a fleet."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import typer

from isthmus.cli import options
from isthmus.cli.options import state_folder
from isthmus.data import dataset_kinds
from isthmus.data.allowed import check_kind
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.federated.offer import SiteConfig, load_site
from isthmus.runtime.device.island_ranks import attend, island_here
from isthmus.runtime.federated.site import RETRIES_S, SiteWorkshop
from isthmus.runtime.identity import Ticket, decode_ticket, read_ticket
from isthmus.runtime.processes.launcher import Place
from isthmus.runtime.processes.memory_limit import limit_memory, machine_memory_bytes
from isthmus.runtime.service.agent import Agent, Membership, join_fleet, membership_in
from isthmus.runtime.service.doctor import examine_device, examine_ticket
from isthmus.runtime.service.machine import Finding
from isthmus.units import parse_size


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says of a device."""

    state: Path | None
    ticket_file: Path | None
    name: str | None
    patience: str
    place: Place
    site: Path | None = None


def kinds_of(text: str) -> tuple[str, ...] | None:
    """Kinds of data in a list with commas; None, for all, where nothing is given. UserError for one that is unknown."""
    if not text:
        return None
    kinds = tuple(kind.strip() for kind in text.split(","))
    for kind in kinds:
        if kind not in dataset_kinds():
            raise unknown_name("--data-kinds", kind, dataset_kinds())
    return kinds


def memory_of(text: str) -> int:
    """Bytes that jobs may take; the machine's where nothing is given. UserError."""
    machine_bytes = machine_memory_bytes()
    found = parse_size(text, "--memory") if text else machine_bytes
    if not found:
        raise UserError(f"--memory {text!r}: got nothing, expected a size such as '4 GiB'")
    return min(found, machine_bytes)


def join(joining: Joining) -> int:
    """Until Ctrl-C or dismissal."""
    told = options.notes()

    def say(text: str) -> None:
        told.print(text, highlight=False, soft_wrap=True)

    folder = joining.state or state_folder("device")
    patience_s = options.patience_s(joining.patience)
    island = island_here(folder)
    if island is not None and joining.site is not None:
        raise UserError("--site: got one under torchrun, expected a site that trains in one process")
    if island is not None and island.rank:
        if joining.place.memory_bytes is not None:
            limit_memory(joining.place.memory_bytes // island.local)
        attend(island, say)
    place = joining.place
    if island is not None:
        place = msgspec.structs.replace(
            place, island=island.folder.absolute(), ranks=island.count, local_ranks=island.local
        )
    if joining.site is not None:
        config = load_site(joining.site)
        check_kind(config.data, place.data_kinds)
        return _attend(config, joining, folder, patience_s, say)
    Agent(folder, _membership(joining, folder, patience_s), place, patience_s=patience_s, say=say).run()
    return 0


def _attend(config: SiteConfig, joining: Joining, folder: Path, patience_s: float, say: Callable[[str], None]) -> int:
    """As `join`, as a site: this process trains, and ends when it cannot do what the coordinator asks for."""
    membership = _membership(joining, folder, patience_s)
    failures: list[IsthmusError] = []

    def fail(error: IsthmusError) -> None:
        failures.append(error)
        agent.stop()

    workshop = SiteWorkshop(config, membership.name, folder, say=say, fail=fail)
    agent = Agent(
        folder, membership, joining.place, patience_s=patience_s, say=say, workshop=workshop, retries_s=RETRIES_S
    )
    try:
        agent.run()
    finally:
        workshop.leave()
    if failures:
        raise failures[0]
    return 0


def examined(folder: Path, ticket_file: Path | None) -> list[Finding]:
    """`isthmus doctor`: the hops to the coordinator, of a device that has joined or of one with a ticket."""
    return examine_device(folder) if ticket_file is None else examine_ticket(read_ticket(ticket_file))


def _membership(joining: Joining, folder: Path, patience_s: float) -> Membership:
    """The one that the folder holds, unless a ticket for another is given."""
    found = membership_in(folder)
    if found is None or joining.ticket_file is not None:
        name = joining.name or platform.node()
        return join_fleet(_ticket(joining.ticket_file), folder, name, patience_s)
    if joining.name not in (None, found.name):
        raise UserError(
            f"--name: got {joining.name!r}, but {folder} has joined as {found.name!r}: use another --state folder, "
            "or a new ticket with --ticket-file"
        )
    return found


def _ticket(file: Path | None) -> Ticket:
    """From a file, a prompt or standard input; never from the command line, which other users can read."""
    if file is not None:
        return read_ticket(file)
    if sys.stdin.isatty():
        return decode_ticket(typer.prompt("Ticket", hide_input=True, err=True))
    lines = iter(sys.stdin.buffer.readline, b"")  # bytes: what is no text is no ticket either
    return decode_ticket(next((line for line in lines if line.strip()), b"").decode(errors="replace"))
