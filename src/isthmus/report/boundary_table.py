"""Boundaries of a model, each planned with the codecs that a loss budget leaves, side by side."""

from __future__ import annotations

import math

import msgspec
from rich.console import RenderableType
from rich.text import Text

from isthmus.expected_loss import more_steps
from isthmus.plans import Replica
from isthmus.report.tables import new_table, titled
from isthmus.units import format_duration, format_share


class BoundaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The plan under one boundary. Where there is none, its figures are None."""

    name: str
    settings: str  # the job's `[model.boundary]` and `[compression]` for it, in TOML
    step_s: float | None = None  # as predicted by the closed form
    bottleneck: str = ""
    replicas: tuple[str, ...] = ()  # as `replica_line` has them
    increase: float | None = None  # increase of the expected loss by boundary and codecs, as a share of the loss
    refused: str | None = None  # why there is no plan

    @property
    def time_to_loss_s(self) -> float:
        """Return the time of all steps that make up for the increase, per step without it; infinite without a plan."""
        if self.step_s is None or self.increase is None:
            return math.inf
        return self.step_s * more_steps(self.increase)


def replica_line(replica: Replica) -> str:
    """Its micro-batches, its devices in order, and the codecs of its messages."""
    devices = ", ".join(stage.device for stage in replica.stages)
    codecs = ", ".join(codecs_of(replica))
    return f"{replica.micro_batches}: {devices}" + (f" ({codecs})" if codecs else "")


def codecs_of(replica: Replica) -> list[str]:
    packed = [c for e in replica.edges for c in (e.forward_compression, e.backward_compression) if c is not None]
    return sorted({c.codec if c.ratio == 1 else f"{c.codec} {c.ratio:g}" for c in packed})


class BoundaryChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The least time to a loss first; those without a plan behind."""

    model: str
    fleet: str
    budget: float
    measured_on: str  # the source of the expected losses
    rows: tuple[BoundaryRow, ...]


def boundary_table(found: BoundaryChoice) -> RenderableType:
    """A row for each boundary, and what to write into the job for the first."""
    columns = (
        "boundary",
        "step",
        "expected loss",
        "what limits the step",
        "micro-batches of each replica, its devices",
    )
    table = new_table(columns, ("step", "expected loss"))
    for row in found.rows:
        if row.step_s is not None and row.increase is not None:
            cells = (
                row.name,
                format_duration(row.step_s),
                f"{row.increase:+.2%}",
                row.bottleneck,
                "\n".join(row.replicas),
            )
            table.add_row(*map(Text, cells))
    lines = [f"{row.name}: no plan: {row.refused}" for row in found.rows if row.refused is not None]
    lines.append(f"expected loss: as measured on {found.measured_on}")
    lines.append(f"for {found.rows[0].name}:\n{found.rows[0].settings.rstrip()}")
    title = f"{found.model} on {found.fleet}: within {format_share(found.budget)} of the loss"
    return titled(title, table, "\n".join(lines))
