"""`isthmus runs` and `dashboard`: the runs of a folder as a table, and in a browser."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from isthmus import api
from isthmus.cli.console import log, show
from isthmus.cli.options import JsonOption, StateOption

app = typer.Typer()


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of runs, or a run's.")] = Path("runs"),
    remove: Annotated[
        list[Path] | None, typer.Option("--remove", metavar="RUN", help="Remove this run's folder; repeatable.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the runs of a folder, the newest first: state, steps and loss; or remove some.

    A run is named as in the list, or by its folder. One that works is not removed.
    """
    for name in remove or ():
        path = name if name.is_absolute() or name.exists() else folder / name
        api.folder.RunFolder(path).remove()
        log(f"removed {path}")
    if not remove:
        listed = importlib.import_module("isthmus.dashboard.run_list")
        found = listed.runs_in(folder)
        show(found, lambda: listed.runs_table(folder, found), json=json)


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
    sources, server = (importlib.import_module(f"isthmus.dashboard.{name}") for name in ("run_folder", "server"))
    source = sources.FleetSource(state) if fleet else sources.FolderSource(run)
    server.serve(source, host, port, typer.echo)
