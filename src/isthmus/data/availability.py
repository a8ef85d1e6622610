"""When clients can take part: a CSV file, as traces of devices come.

    client, from, to
    17,     0 s,  2 h
    17,     20 h, 24 h

A client may have any number of lines; without one it is never available. Times are texts with units, or seconds.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.units import parse_duration, whole_number

COLUMNS = ("client", "from", "to")


@dataclass(frozen=True, eq=False)
class Availability:
    """Line i says that client `clients[i]` can take part from `from_s[i]` until before `to_s[i]`."""

    clients: NDArray[np.int64]
    from_s: NDArray[np.float64]
    to_s: NDArray[np.float64]
    round_length_s: float

    def at_round(self, round_: int) -> NDArray[np.int64]:
        """Clients that are available when the round opens, ascending. Round r opens at r times the round's length, so
        a run can be repeated."""
        now_s = round_ * self.round_length_s
        return np.unique(self.clients[(self.from_s <= now_s) & (now_s < self.to_s)])


def read_availability(path: Path, population: int, round_length_s: float) -> Availability:
    """UserError names the file, the line, what was got and what was expected."""
    where = f"federated.participation.availability: {path}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{where}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    try:
        head, *rows = csv.reader(lines, skipinitialspace=True) if lines else [[]]
    except csv.Error as e:
        raise UserError(f"{where}: cannot be read: {e}") from None
    names = [name.strip() for name in head]
    if sorted(names) != sorted(COLUMNS):
        raise UserError(f"{where}: got columns {names}, expected {', '.join(COLUMNS)}")
    found: list[tuple[int, float, float]] = []
    for number, row in enumerate(rows, 2):
        if any(cell.strip() for cell in row):
            cells = dict(zip(names, (cell.strip() for cell in row), strict=False))
            found.append(_line(cells, population, f"{where}: line {number}"))
    if not found:
        raise UserError(f"{where}: got no line, expected at least one")
    clients, from_s, to_s = (np.array(column) for column in zip(*found, strict=True))
    return Availability(clients.astype(np.int64), from_s, to_s, round_length_s)


def _line(cells: dict[str, str], population: int, where: str) -> tuple[int, float, float]:
    missing = [name for name in COLUMNS if not cells.get(name)]
    if missing:
        raise UserError(f"{where}: no {missing[0]}")
    client = whole_number(cells["client"])
    if client is None or client >= population:
        raise UserError(f"{where}: client: got {_short(cells['client'])}, expected a number below {population}")
    from_s, to_s = (_seconds(cells[name], f"{where}: {name}") for name in ("from", "to"))
    if not to_s > from_s:
        raise UserError(f"{where}: to: got {cells['to']!r}, expected a time after {cells['from']!r}")
    return client, from_s, to_s


def _seconds(cell: str, field: str) -> float:
    try:
        found = float(cell)
    except ValueError:
        return parse_duration(cell, field)
    if not math.isfinite(found):
        raise UserError(f"{field}: got {_short(cell)}, expected a finite number of seconds, or a text as 2 h")
    return found


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else f"{cell[:37]}...")
