"""Is a plan of `auto` worse than it was? Plans the problems of a file of `run.py` again.

`python benchmarks/auto/again.py [--quick] [--processes N] [--against PATH] [--json PATH]`

The file is written after each problem, and problems that it holds are not planned again. Ends with 1 where a plan takes
longer than that file says, or is refused where there was one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from cases import large_case, small_case
from rich.console import Console
from rich.table import Table
from run import LATEST, ROUNDING, Report

from isthmus.errors import FleetTooSmall
from isthmus.planners import plan as make_plan

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

AGAIN = Path(__file__).parent / "results" / "again.json"
QUICK = 12
Kind = Literal["small", "large"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    seed: int
    devices: int
    before_s: float | None
    step_s: float | None
    """None where nothing fits."""
    cpu_s: float

    @property
    def ratio(self) -> float | None:
        """Infinite where it is refused now, 0 where it was; None where both are."""
        if self.step_s is None:
            return None if self.before_s is None else float("inf")
        return 0.0 if self.before_s is None else self.step_s / self.before_s

    @property
    def worse(self) -> bool:
        return (self.ratio or 0.0) > 1 + ROUNDING


class Asked(NamedTuple):
    kind: Kind
    seed: int
    devices: int
    before_s: float | None


def again(asked: Asked) -> Row:
    start_s, step_s = time.process_time(), None
    with contextlib.suppress(FleetTooSmall):
        step_s = make_plan("auto", (small_case if asked.kind == "small" else large_case)(asked.seed)).predicted.step_s
    return Row(**asked._asdict(), step_s=step_s, cpu_s=time.process_time() - start_s)


def table(rows: Sequence[Row]) -> Table:
    headings = (
        "problems",
        "number",
        "faster",
        "slower",
        "planned now alone",
        "least ratio",
        "worst ratio",
        "median CPU",
    )
    drawn = Table(*headings, title="auto against its plans of before")
    for kind in ("small", "large"):
        of_kind = [row for row in rows if row.kind == kind]
        ratios = [row.ratio for row in of_kind if row.ratio]
        if ratios:
            drawn.add_row(
                kind,
                str(len(of_kind)),
                str(sum(ratio < 1 - ROUNDING for ratio in ratios)),
                str(sum(row.worse for row in of_kind)),
                str(sum(row.ratio == 0.0 for row in of_kind)),
                f"{min(ratios):.3f}",
                f"{max(ratios):.9f}",
                f"{statistics.median(row.cpu_s for row in of_kind):.2f} s",
            )
    return drawn


def main() -> int:
    options = options_of(__doc__, AGAIN, f"{QUICK} problems of each kind")
    options.add_argument("--processes", type=int, default=os.cpu_count(), help="at a time")
    options.add_argument("--against", type=Path, default=LATEST, metavar="PATH", help="a file of run.py")
    given = options.parse_args()
    before = msgspec.json.decode(given.against.read_bytes(), type=Report)
    rows = msgspec.json.decode(given.json.read_bytes(), type=list[Row]) if given.json.exists() else list[Row]()
    known = {(row.kind, row.seed) for row in rows}
    most = QUICK if given.quick else None
    todo = [Asked("small", r.seed, r.devices, r.step_s) for r in before.small[:most]]
    todo += [Asked("large", r.seed, r.devices, r.step_s) for r in before.large[:most]]
    with get_context("spawn").Pool(given.processes) as pool:
        for row in pool.imap_unordered(again, [one for one in todo if (one.kind, one.seed) not in known]):
            rows.append(row)
            write_figures(given.json, sorted(rows, key=lambda r: (r.kind, r.seed)))
            if row.worse:
                print(f"{row.kind} {row.seed}: {row.ratio}", file=sys.stderr)
    Console(width=150).print(table(rows))
    return 1 if any(row.worse for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
