"""A view that stays in place on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live


def is_watched(console: Console) -> bool:
    """Whether a view may stay in place; elsewhere plain lines are written."""
    return console.is_terminal and console.is_interactive


def still_live(console: Console) -> Live | None:
    """A view that changes when it is updated, without a thread of its own and without taking over standard error, for
    processes are forked while it is shown; None where nothing stays in place."""
    if not is_watched(console):
        return None
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
