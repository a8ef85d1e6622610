"""`isthmus doctor`: what stands in the way of this machine. It needs nothing but the plain package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from isthmus.api.doctor import Finding, examine
from isthmus.cli.options import JsonOption, out, print_json

app = typer.Typer()


@app.command()
def doctor(
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder of the key; default ~/.local/state/isthmus/device.")
    ] = None,
    ticket_file: Annotated[
        Path | None, typer.Option("--ticket-file", help="Look with this ticket, before joining. It is not used up.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what stands in the way of this machine, or of a device that joined, and what to do.

    Before it joined: Python, libraries, accelerators, ports and folders. Afterwards, or with a ticket: each hop
    of the way to the coordinator.
    """
    raise typer.Exit(examined(state, ticket_file, out(), json=json))


def examined(state: Path | None, ticket_file: Path | None, out: Console, *, json: bool) -> int:
    """The exit code: 0 when nothing is wrong."""
    found = examine(state, ticket_file)
    title = "On the way to the coordinator" if found.joined else "This machine, which has joined no fleet"
    _show(found.findings, title, out, json=json)
    if found.good and not found.joined and not json:
        out.print("OK: it can plan, train, serve and join; `isthmus join` with a ticket comes next")
    return 0 if found.good else 1


def _show(findings: Sequence[Finding], title: str, out: Console, *, json: bool) -> None:
    if json:
        print_json(findings)
        return
    drawn = Table("hop", "", "found", "what to do", title=title)
    for finding in findings:
        remedy = "" if finding.good and title.startswith("This") else finding.remedy
        drawn.add_row(finding.hop, "ok" if finding.good else "BROKEN", finding.detail, remedy)
    out.print(drawn)
