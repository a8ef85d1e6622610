"""What was found is kept, a line for each moment, as it is found: who is interrupted goes on from there."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from isthmus.documents import read_lines

from .rows import Found, Row


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    row: str
    seed: int
    found: Found
    wall_s: float
    """That it took in all."""
    load: float = 0.0
    """Of the machine at its end: processes that compute or want to."""


class RowSummary(msgspec.Struct, frozen=True, kw_only=True):
    row: str
    description: str
    moments: int
    faults: int
    failed: tuple[int, ...]
    """Seeds."""
    median_s: float | None
    """From the fault until a step was done again."""
    longest_s: float | None
    redone: float
    """Steps that were done again, of each moment."""
    lengths: dict[str, int]
    """How many moments had a fault of this length."""
    notes: dict[str, int]
    load: float
    """Median."""


def read(path: Path) -> list[Moment]:
    """Of each row and seed the last one that was found."""
    found = {(moment.row, moment.seed): moment for moment in read_lines(path, Moment)}
    return list(found.values())


def append(path: Path, moment: Moment) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(moment) + b"\n")


def summed_up(row: Row, moments: Sequence[Moment]) -> RowSummary:
    seconds = [s for moment in moments for s in moment.found.seconds]
    return RowSummary(
        row=row.name,
        description=row.description,
        moments=len(moments),
        faults=sum(m.found.faults for m in moments),
        failed=tuple(sorted(m.seed for m in moments if m.found.wrong)),
        median_s=statistics.median(seconds) if seconds else None,
        longest_s=max(seconds, default=None),
        redone=statistics.mean(m.found.redone for m in moments) if moments else 0.0,
        lengths=_counted(f"{m.found.length_s:g} s" for m in moments if m.found.length_s),
        notes=_counted(m.found.note for m in moments if m.found.note),
        load=statistics.median(m.load for m in moments) if moments else 0.0,
    )


def _counted(words: Iterable[str]) -> dict[str, int]:
    listed = list(words)
    return {word: listed.count(word) for word in sorted(set(listed))}


def table(summaries: Iterable[RowSummary]) -> Table:
    made = Table(
        "fault", "moments", "failed", "recovery, median", "longest", "steps again, mean", "load", "", title="Faults"
    )
    for one in summaries:
        median, longest = ("-" if s is None else f"{s:.1f} s" for s in (one.median_s, one.longest_s))
        lengths = [f"{count} of {length}" for length, count in one.lengths.items()]
        notes = [f"{word} ({count})" for word, count in one.notes.items()]
        failed = ", ".join(map(str, one.failed)) or "none"
        made.add_row(
            one.description,
            str(one.moments),
            failed,
            median,
            longest,
            f"{one.redone:.1f}",
            f"{one.load:.1f}",
            "; ".join((*lengths, *notes)),
        )
    return made
