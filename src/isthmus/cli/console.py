"""Where commands print: results on standard output, progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import typer
from rich.console import Console

import isthmus
from isthmus import api
from isthmus.errors import Interrupted

# Names and reasons come from files and from other parties: "[data]" in one of them is text, not a style.


def out() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else 140, markup=False)


class Notes(Console):
    """Standard error. A run goes on after its reader has gone: rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def notes() -> Console:
    """Standard error."""
    return Notes(stderr=True, markup=False)


def log(text: str) -> None:
    """One line on standard error."""
    notes().print(text, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """On standard output, indented."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def show(value: object, table: Callable[[], object], *, json: bool) -> None:
    """On standard output, as JSON or as a table."""
    print_json(value) if json else out().print(table())


def show_run(act: Callable[[api.terminal.Terminal], isthmus.Run | isthmus.FederatedResult], *, json: bool) -> int:
    """Run with progress and results on the terminal; the exit code."""
    terminal = api.terminal.Terminal(out(), notes(), json=json)
    try:
        run = act(terminal)
        if json and terminal.document is None and isinstance(run, isthmus.Run):
            terminal.document = api.terminal.run_document(run, finished=False)
        return 130 if run.outcome == "interrupted" else 0
    except Interrupted as e:
        log(str(e))
        folder = None if e.folder is None else Path(e.folder)
        if json and folder is not None and not api.run.is_federated_run(folder):
            terminal.document = api.terminal.run_document(isthmus.Run(folder), finished=False)
        return 130
    finally:
        if terminal.document is not None:  # also of a run that failed in the end
            print_json(terminal.document)
