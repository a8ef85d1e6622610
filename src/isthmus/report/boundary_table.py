"""Boundaries of a model, each planned with the codecs that a loss budget leaves, side by side."""

from __future__ import annotations

import msgspec
from rich.console import RenderableType
from rich.text import Text

from isthmus.report.tables import new_table, titled
from isthmus.units import format_duration, format_share


class BoundaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The plan under one boundary. Where there is none, its figures are None."""

    name: str
    settings: str
    """The job's `[model.boundary]` and `[compression]` for it, in TOML."""
    step_s: float | None = None
    """As predicted by the closed form."""
    bottleneck: str = ""
    increase: float | None = None
    """Of the loss that is expected, as a share of it: boundary and codecs."""
    refused: str | None = None
    """Why there is no plan."""


class BoundaryChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest first; those without a plan behind."""

    model: str
    fleet: str
    budget: float
    measured_on: str
    """What the expected losses come from."""
    rows: tuple[BoundaryRow, ...]


def boundary_table(found: BoundaryChoice) -> RenderableType:
    """A row for each boundary, and what to write into the job for the first."""
    table = new_table(("boundary", "step", "expected loss", "what limits the step"), ("step", "expected loss"))
    for row in found.rows:
        if row.step_s is not None and row.increase is not None:
            cells = row.name, format_duration(row.step_s), f"{row.increase:+.2%}", row.bottleneck
            table.add_row(*map(Text, cells))
    lines = [f"{row.name}: no plan: {row.refused}" for row in found.rows if row.refused is not None]
    lines.append(f"expected loss: as measured on {found.measured_on}")
    lines.append(f"for {found.rows[0].name}:\n{found.rows[0].settings.rstrip()}")
    title = f"{found.model} on {found.fleet}: within {format_share(found.budget)} of the loss"
    return titled(title, table, "\n".join(lines))
