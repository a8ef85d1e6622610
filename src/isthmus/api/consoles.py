"""Where results and progress are printed. Only rich is imported, which help texts do without."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.live import Live

LOG_WIDTH = 140  # columns of a file, or what else is no terminal

# Names and reasons come from files and from other parties: "[data]" in one of them is text, not a style.


def out() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else LOG_WIDTH, markup=False)


class Notes(Console):
    """Standard error. A run goes on after its reader has gone: rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def notes(width: int | None = None) -> Console:
    """Standard error, so wide if it is no terminal."""
    return Notes(stderr=True, markup=False, width=None if sys.stderr.isatty() else width)


def live(console: Console) -> Live:
    """Return a display that is shown in place, until it is shown anew."""
    return Live(console=console, auto_refresh=False)
