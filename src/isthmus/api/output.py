"""Results as people and other programs read them: tables, pictures, fleets as TOML, traces for a viewer; and the files
that a command is asked to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isthmus.errors import UserError
from isthmus.fleet import dump_fleet
from isthmus.plans import load_plan
from isthmus.report import (
    compared_table,
    comparison_table,
    draw_plan,
    explanation_text,
    plan_table,
    verdict_table,
    what_if_table,
)
from isthmus.report.comparison import boundary_table, sweep_table
from isthmus.report.graph_table import graph_table
from isthmus.report.rounds_table import replicas_table, rounds_table
from isthmus.report.tables import device_text, fitted_text, matrix_table
from isthmus.trace import busy_share, steady_step_s, write_perfetto

__all__ = [
    "boundary_table",
    "busy_share",
    "compared_table",
    "comparison_table",
    "device_text",
    "draw_plan",
    "dump_fleet",
    "explanation_text",
    "fitted_text",
    "graph_table",
    "load_plan",
    "matrix_table",
    "plan_table",
    "replicas_table",
    "rounds_table",
    "steady_step_s",
    "sweep_table",
    "verdict_table",
    "what_if_table",
    "write_perfetto",
]


def check_file(option: str, path: Path | None, ending: str = "") -> None:
    """Before the work whose result the file is. UserError for a file that cannot be, or has another ending."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: {path.parent} is not a folder")
    if path.is_dir():
        raise UserError(f"{option} {path}: cannot be written: Is a directory")
    if path.suffix.lower() != ending and ending:
        raise UserError(f"{option}: got {path}, expected a name that ends in {ending}")


def write_file(option: str, path: Path | None, write: Callable[[Path], object]) -> None:
    """If one is asked for. UserError where it cannot be written."""
    if path is None:
        return
    try:
        write(path)
    except OSError as e:
        raise UserError(f"{option} {path}: cannot be written: {e.strerror or e}") from None
