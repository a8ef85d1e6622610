"""A link's history as people have it: a CSV file, or rows in the fleet's own file.

    time, latency, bandwidth
    0 s,  21 ms,   95 Mbit/s
    60 s, 35 ms,   40 Mbit/s

The columns may stand in any order. A cell is a text with a unit, or an SI base value.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from isthmus.errors import UserError
from isthmus.fleet.links import LinkTrace
from isthmus.units import parse_bandwidth, parse_duration

COLUMNS = ("time", "latency", "bandwidth")


def read_link_trace(given: object, folder: Path, where: str) -> LinkTrace:
    """The trace of a CSV file, whose path counts from `folder`, or of a list of rows. Raises `UserError`."""
    if isinstance(given, str):
        path = folder / given
        return _trace(_file_rows(path, where), f"{where} {path}")
    if isinstance(given, list):
        return _trace(cast("list[object]", given), where)
    raise UserError(f"{where}: got {given!r}, expected the path of a CSV file or a list of [time, latency, bandwidth]")


def _file_rows(path: Path, where: str) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    head, *rows = csv.reader(lines, skipinitialspace=True) if lines else [[]]
    names = [name.strip() for name in head]
    if sorted(names) != sorted(COLUMNS):
        raise UserError(f"{where}: {path}: got columns {names}, expected {', '.join(COLUMNS)}")
    order = [names.index(column) for column in COLUMNS]
    full = [row for row in rows if any(cell.strip() for cell in row)]
    for number, row in enumerate(full, 1):
        if len(row) != len(COLUMNS):
            raise UserError(f"{where}: {path}: row {number}: got {len(row)} cells, expected {len(COLUMNS)}")
    return [[row[i].strip() for i in order] for row in full]


def _trace(rows: Sequence[object], where: str) -> LinkTrace:
    samples: list[tuple[float, float, float]] = []
    for number, row in enumerate(rows, 1):
        at = f"{where}: row {number}"
        if not isinstance(row, list) or len(cells := cast("list[object]", row)) != len(COLUMNS):
            raise UserError(f"{at}: got {row!r}, expected [time, latency, bandwidth]")
        time, latency, bandwidth = map(_number, cells)
        samples.append(
            (
                parse_duration(time, f"{at}: time"),
                parse_duration(latency, f"{at}: latency"),
                parse_bandwidth(bandwidth, f"{at}: bandwidth"),
            )
        )
    if not samples:
        raise UserError(f"{where}: got no row, expected at least one")
    try:
        return LinkTrace(*(tuple(column) for column in zip(*samples, strict=True)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _number(cell: object) -> object:
    """A CSV file has no numbers, only texts."""
    try:
        return float(cell) if isinstance(cell, str) else cell
    except ValueError:
        return cell
