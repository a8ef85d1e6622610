"""`isthmus dashboard`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.options import StateOption

app = typer.Typer()


@app.command()
def dashboard(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a folder of runs.")] = Path("runs"),
    fleet: Annotated[bool, typer.Option("--fleet", help="The fleet that is served here, and its jobs' runs.")] = False,
    state: StateOption = None,
    host: Annotated[str, typer.Option("--host", help="Listen here; not on loopback: with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 7434,
) -> None:
    """Show runs in a browser, while they work and afterwards, until Ctrl-C; prints the page's address.

    It reads run folders and writes nothing.
    """
    sources, server = (importlib.import_module(f"isthmus.dashboard.{name}") for name in ("sources", "server"))
    source = sources.FleetSource(state) if fleet else sources.FolderSource(run)
    server.serve(source, host, port, typer.echo)
