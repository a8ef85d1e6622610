"""`isthmus doctor`: what stands in the way of this machine. It needs nothing but the plain package."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from isthmus.cli.options import PORT, JsonOption, out, state_folder
from isthmus.runtime.service.machine import Finding, examine_machine

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
    folder = state or state_folder("device")
    if ticket_file is None and not any((folder / name).exists() for name in ("key.pem", "membership.json")):
        findings = examine_machine({"keys of a device": folder, "runs": Path("runs")}, PORT)
        _show(findings, "This machine, which has joined no fleet", out, json=json)
        good = all(finding.good for finding in findings)
        if good and not json:
            out.print("OK: it can plan, train, serve and join; `isthmus join` with a ticket comes next")
        return 0 if good else 1
    # Imported by name, as it needs torch: what is missing is found above
    findings = importlib.import_module("isthmus.cli.joining").examined(folder, ticket_file)
    _show(findings, "On the way to the coordinator", out, json=json)
    return 0 if findings[-1].good else 1


def _show(findings: Sequence[Finding], title: str, out: Console, *, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(findings), indent=1).decode())
        return
    drawn = Table("hop", "", "found", "what to do", title=title)
    for finding in findings:
        remedy = "" if finding.good and title.startswith("This") else finding.remedy
        drawn.add_row(finding.hop, "ok" if finding.good else "BROKEN", finding.detail, remedy)
    out.print(drawn)
