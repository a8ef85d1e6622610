"""The runs of a folder as a table on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from isthmus.dashboard.run_folder import FolderSource
from isthmus.dashboard.run_view import Shown, head
from isthmus.report.tables import new_table, titled


def runs_in(folder: Path) -> list[Shown]:
    """A line for each run of this folder, or of a sweep in it, the newest first. UserError as `FolderSource`."""
    return [head(run) | {"name": name} for name, run in FolderSource(folder).runs().items()]


def runs_table(folder: Path, runs: list[Shown]) -> RenderableType:
    if not runs:
        return Text(f"{folder}: no run has begun here")
    table = new_table(("run", "state", "done", "loss", ""), ("loss",))
    for run in runs:
        done = f"{run['done']} of {run['of']} {run['unit']}s"
        loss = run["loss"]
        table.add_row(
            str(run["name"]),
            str(run["state"]),
            "" if run["problem"] else done,
            f"{loss:.4f}" if isinstance(loss, float) else "",
            str(run["problem"]),
        )
    return titled(f"Runs in {folder}", table)
