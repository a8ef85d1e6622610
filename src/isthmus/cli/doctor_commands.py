"""`isthmus doctor`: what stands in the way of this machine. It needs nothing but the plain package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus import api
from isthmus.cli.console import out, print_json
from isthmus.cli.options import DeviceStateOption, JsonOption

app = typer.Typer()


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
