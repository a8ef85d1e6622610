"""Output in a notebook: a run's progress as a table that is kept up to date, and its pictures."""

from __future__ import annotations

import base64
import contextlib
import html
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

from isthmus import api
from isthmus.api.consoles import LOG_WIDTH, notes
from isthmus.api.observer import Observer, Silent, StepDone
from isthmus.callbacks import Evaluated
from isthmus.errors import UserError
from isthmus.figures import figures_of, figures_text
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.plans import Plan


def table_of(rows: Mapping[str, str]) -> str:
    """Two columns.

    >>> table_of({"loss": "< 1"})
    '<table><tr><th>loss</th><td>&lt; 1</td></tr></table>'
    """
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def picture_of(path: Path) -> str:
    """A PNG inline: the notebook keeps it when the folder is gone."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}" style="max-width: 100%">'


LAST_NOTES = 5


class Handle(Protocol):
    """A cell's output that can be replaced."""

    def update(self, shown: object, /) -> None: ...


Display = Callable[..., Handle]


class Html:
    """Markup that a notebook shows as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text


class NotebookObserver(Observer):
    """A table of figures and the last notes, in one output of the cell. `display` is IPython's."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._handle: Handle | None = None
        self._rows: dict[str, str] = {}
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        self._notes = [*self._notes, text][-LAST_NOTES:]
        self._show()

    def planned(self, plan: Plan, fleet: Fleet, graph: OpGraph) -> None:
        self._rows["plan"] = f"{plan.model} on {', '.join(plan.used)} of fleet {fleet.name}"
        self._rows["predicted step"] = f"{plan.predicted.expected_s:.3g} s"
        self._show()

    def stepped(self, done: StepDone) -> None:
        self._rows[done.unit] = f"{done.step} of {done.steps}"
        self._rows["figures"] = ", ".join([*figures_text(figures_of(done)), *filter(None, (done.text,))])
        if done.busy:
            self._rows["busy"] = ", ".join(f"{device} {share:.0%}" for device, share in done.busy.items())
        self._show()

    def evaluated(self, found: Evaluated) -> None:
        self._rows["evaluation"] = f"{found} ({found.unit} {found.step})"
        self._show()

    def _show(self) -> None:
        shown = Html(table_of(self._rows) + "".join(f"<div>{html.escape(note)}</div>" for note in self._notes))
        if self._handle is None:
            self._handle = self._display(shown, display_id=True)
        else:
            self._handle.update(shown)


def warned(*, quiet: bool) -> contextlib.AbstractContextManager[object]:
    """Within it Python's warnings are ignored if a call is to be quiet."""
    return warnings.catch_warnings(action="ignore") if quiet else contextlib.nullcontext()


def default_observer(*, quiet: object = False) -> Observer:
    """In a notebook a table; elsewhere all that the command line prints, on standard error.

    UserError for a `quiet` that is neither true nor false."""
    if not isinstance(quiet, bool):
        raise UserError(f"quiet: got {quiet!r:.80}, expected true or false")
    if quiet:
        return Silent()
    if "IPython" in sys.modules:
        shell: object = importlib.import_module("IPython").get_ipython()
        if shell is not None and hasattr(shell, "kernel"):  # the shell of a terminal replaces no output
            return NotebookObserver(cast(Display, importlib.import_module("IPython.display").display))
    console = notes(LOG_WIDTH)
    return api.terminal.Terminal(console, console)
