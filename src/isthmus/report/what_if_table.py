"""Effects of changes of a job or a fleet, each planned anew, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from isthmus.report.tables import new_table, titled
from isthmus.units import format_duration


class WhatIfRow(msgspec.Struct, frozen=True, kw_only=True):
    """The plan under one change. Where there is none, its figures are None."""

    change: str  # as `--what-if` takes it; empty for the job as it is
    what: str  # in words
    refused: str | None = None  # why there is no plan
    step_s: float | None = None  # as simulated
    samples_per_s: float | None = None
    price_per_1000_samples: float | None = None
    """Devices and egress, in the unit of the fleet's prices; None where nothing has a price."""
    devices: int | None = None  # how many the plan uses
    bought_per_hour: float = 0.0
    """Price per hour of the devices that the change adds, less that of those that it removes."""
    gained_per_price: float | None = None
    """Samples per second gained for each unit of money per hour; None where the change buys nothing with a price."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The job as it is, then the changes in the order in which they were asked for."""

    model: str
    fleet: str
    rows: tuple[WhatIfRow, ...]
    left_out: int = 0  # changes that were not planned, since planning was interrupted

    @property
    def best_purchase(self) -> WhatIfRow | None:
        """The purchase that gains the most samples per second for its price; None where none gains any."""
        paying = [row for row in self.rows if row.gained_per_price is not None and row.gained_per_price > 0]
        return max(paying, key=lambda row: row.gained_per_price or 0.0, default=None)


def what_if_table(found: WhatIf) -> RenderableType:
    """A row for each change that has a plan, the fastest first; the others below, each with its reason."""
    now = found.rows[0]
    numbers = ["step", "samples/s", "against\ntoday", "devices"]
    priced = any(row.price_per_1000_samples is not None for row in found.rows)
    bought = any(row.gained_per_price is not None for row in found.rows)
    numbers += ["price of 1,000\nsamples"] * priced + ["samples/s per\nprice per hour"] * bought
    table = new_table(("change", *numbers, "--what-if"), numbers)
    for row in sorted(found.rows, key=lambda row: -(row.samples_per_s or 0.0)):
        if row.refused is None:
            cells = [*_cells(row, now), *[_number(row.price_per_1000_samples)] * priced]
            cells += [_number(row.gained_per_price)] * bought
            table.add_row(Text(row.what, "bold" if row is now else ""), *map(Text, cells), Text(row.change))
    return titled(f"{found.model} on {found.fleet}: planned anew under each change", table, "\n".join(_lines(found)))


def _cells(row: WhatIfRow, now: WhatIfRow) -> list[str]:
    assert row.step_s is not None and row.samples_per_s is not None
    gain = None if row is now or now.samples_per_s is None else row.samples_per_s / now.samples_per_s - 1
    return [
        format_duration(row.step_s),
        f"{row.samples_per_s:.4g}",
        "-" if gain is None else f"{gain:+.1%}",
        str(row.devices),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _lines(found: WhatIf) -> Sequence[str]:
    lines = [f"{row.what}: no plan: {row.refused}" for row in found.rows if row.refused is not None]
    best, now_s = found.best_purchase, found.rows[0].samples_per_s or 0.0
    if best is not None and best.samples_per_s is not None:
        gain, price = best.samples_per_s - now_s, best.bought_per_hour
        lines.append(f"pays most: {best.what}: {gain:.3g} samples/s more for {price:.4g} per hour")
    elif any(row.gained_per_price is not None for row in found.rows):
        lines.append("no purchase makes the job faster")
    if found.left_out:
        lines.append(f"planning was interrupted: {found.left_out} changes have no row")
    return lines
