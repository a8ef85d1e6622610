"""Where commands print: results on standard output, progress on standard error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import typer

import isthmus
from isthmus import api
from isthmus.errors import Interrupted


def out() -> api.consoles.Console:
    """Standard output."""
    return api.consoles.out()


def notes() -> api.consoles.Console:
    """Standard error."""
    return api.consoles.notes()


def log(text: str) -> None:
    """One line on standard error."""
    notes().print(text, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """On standard output, indented."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def show(value: object, table: Callable[[], object], *, json: bool) -> None:
    """On standard output, as JSON or as a table."""
    print_json(value) if json else out().print(table())


def show_run(act: Callable[[api.terminal.Terminal], isthmus.Run], *, json: bool) -> int:
    """Run with progress and results on the terminal; the exit code."""
    terminal = api.terminal.Terminal(out(), notes(), json=json)
    try:
        run = act(terminal)
        if json and terminal.document is None:
            terminal.document = api.terminal.run_document(run, finished=False)
        return 130 if run.outcome == "interrupted" else 0
    except Interrupted as e:
        log(str(e))
        folder = None if e.folder is None else Path(e.folder)
        if json and folder is not None:
            terminal.document = api.terminal.run_document(isthmus.Run(folder), finished=False)
        return 130
    finally:
        if terminal.document is not None:  # also of a run that failed in the end
            print_json(terminal.document)
