"""A device's side of a fleet: `isthmus join`; what a site's owner sees and says; and what stands in the way of this
machine, which needs nothing but the plain package."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from isthmus import api
from isthmus.cli.console import log, out, print_json, show
from isthmus.cli.options import DeviceStateOption, JsonOption, TimeoutOption, with_groups
from isthmus.engines import ENGINES
from isthmus.errors import UserError
from isthmus.sanitize import sanitize

app = typer.Typer()


@dataclass(frozen=True)
class MemberOptions:
    """The name, the ticket and the rights of a member of the fleet."""

    name: Annotated[str | None, typer.Option("--name", help="As the fleet calls it; default: the host's name.")] = None
    ticket_file: Annotated[
        Path | None, typer.Option("--ticket-file", help="A 0600 file; else it is asked for, or read from stdin.")
    ] = None
    site: Annotated[
        Path | None, typer.Option("--site", help="Federated: a TOML with this site's data and what may run on them.")
    ] = None
    one_owner: Annotated[
        bool,
        typer.Option("--one-owner", help="The whole fleet is yours: jobs name your code and files; digests are plain."),
    ] = False
    attached: Annotated[
        bool, typer.Option("--attached", help="Read the ticket from stdin, and end when stdin closes: for launchers.")
    ] = False
    timeout: TimeoutOption = "60 s"
    state: DeviceStateOption = None


@dataclass(frozen=True)
class DeviceOptions:
    """Which devices this machine is, and what computes on them."""

    device: Annotated[
        list[str] | None, typer.Option("--device", help="cpu, cuda:0, mps, ...; default: auto, a GPU if there is one.")
    ] = None
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            metavar="all|auto|0,2",
            help="A device for each of these accelerators, NAME/0, NAME/2, ..., with one ticket; auto: all if any.",
        ),
    ] = ""
    shard: Annotated[
        bool, typer.Option("--shard", help="Under torchrun: each rank holds a part of a stage's weights, not all.")
    ] = False
    per_rank: Annotated[
        bool,
        typer.Option(
            "--per-rank", help="Under torchrun: each rank is a device, NAME/RANK; a ticket per line and rank."
        ),
    ] = False
    engine: Annotated[str, typer.Option("--engine", help=f"What computes: {' or '.join(ENGINES)}.")] = "torch"
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with this device's data: jobs name files in it, no others.")
    ] = None
    data_kinds: Annotated[
        str, typer.Option("--data-kinds", help="Kinds of data that jobs may name: text,npz; default: all installed.")
    ] = ""
    weights_from: Annotated[
        list[str] | None,
        typer.Option("--weights-from", help="URL below which jobs may have it read weights: s3://bucket/models."),
    ] = None
    checkpoints_to: Annotated[
        list[str] | None,
        typer.Option("--checkpoints-to", help="URL below which jobs may have it write checkpoints: s3://bucket/runs."),
    ] = None
    memory: Annotated[
        str, typer.Option("--memory", help="What jobs may take of each device's: 4GiB; default: all.")
    ] = ""


@dataclass(frozen=True)
class ListenOptions:
    """Where other devices reach it."""

    host: Annotated[
        str, typer.Option("--host", help="Address to listen on for other devices; default: towards the coordinator.")
    ] = ""
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port for it, of several devices the first; 0: any.")
    ] = 0
    address: Annotated[str, typer.Option("--address", help="How others reach it, where that is not --host.")] = ""
    relayed: Annotated[
        bool, typer.Option("--relayed", help="Do not listen: the coordinator relays all connections of other devices.")
    ] = False


@app.command()
@with_groups
def join(member: MemberOptions, here: DeviceOptions, listen: ListenOptions) -> None:
    """Join a fleet and stay, ready to work. The first time it needs a ticket."""
    if here.data is not None and not here.data.is_dir():
        raise UserError(f"--data {here.data}: not a folder")
    place = api.join.ProcessPlace(
        host="127.0.0.1" if listen.relayed else listen.host,
        port=listen.port,
        address=listen.address,
        relayed=listen.relayed,
        engine=api.join.check_engine("--engine", here.engine),
        data=here.data,
        data_kinds=api.join.kinds_of(here.data_kinds),
        weights_from=api.join.urls_of(here.weights_from or ()),
        checkpoints_to=api.join.urls_of(here.checkpoints_to or (), "--checkpoints-to"),
        memory_bytes=api.join.memory_of(here.memory),
        sharded=here.shard,
    )
    asked = api.join.JoinOptions(
        **vars(member),
        place=place,
        device=api.join.single_device(here.device, api.join.AUTO),
        devices=here.devices,
        memory=here.memory,
        per_rank=here.per_rank,
    )
    raise typer.Exit(api.join.join_as(asked, log, _asked_ticket))


def _asked_ticket() -> str:
    """From a prompt or standard input; never from the command line, which other users can read."""
    if sys.stdin.isatty():
        return typer.prompt("Ticket", hide_input=True, err=True)
    lines = iter(sys.stdin.buffer.readline, b"")  # bytes: what is no text is no ticket either
    return next((line for line in lines if line.strip()), b"").decode(errors="replace")


@app.command()
def site(
    what: Annotated[Literal["log", "yes", "no"], typer.Argument(help="Show the log, or answer what was asked last.")],
    state: DeviceStateOption = None,
    json: JsonOption = False,
) -> None:
    """Show a site's owner what was asked and what left the site, or say yes or no to a coordinator."""
    if what == "log":
        found = api.site.log(state)
        show(found, lambda: api.site.table(found), json=json)
        return
    asked = api.site.answer(state, yes=what == "yes")
    show([asked], lambda: api.site.table([asked]), json=json)
    log(f"answered {what}: the run of {sanitize(asked.job)}")


@app.command()
def doctor(
    state: DeviceStateOption = None,
    ticket_file: Annotated[
        Path | None, typer.Option("--ticket-file", help="Look with this ticket, before joining. It is not used up.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what stands in the way of this machine, or of a device that joined, and what to do.

    Before it joined: Python, libraries, accelerators, ports and folders. Afterwards, or with a ticket: each hop
    of the way to the coordinator.
    """
    found = api.doctor.examine(state, ticket_file)
    if json:
        print_json(found.findings)
    else:
        out().print(found.table())
        if found.good and not found.joined:
            out().print("OK: it can plan, train, serve and join; `isthmus join` with a ticket comes next")
    raise typer.Exit(0 if found.good else 1)
