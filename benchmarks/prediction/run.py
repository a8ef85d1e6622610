"""Prediction: the simulator's steady step against the measured one, on pairs of (fleet, model).

`python benchmarks/prediction/run.py [--quick] [--json PATH]`

Rows are written as they are measured. With `--only`, the other rows of the file stay: this is for measuring again what
the host's other work disturbed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from measure import Emulation, Result, Settings, network_result
from pairs import PAIRS, QUICK, Pair
from rich.console import Console
from rich.table import Table

from isthmus_testing.lab import lab_unavailable

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
MEDIAN_LIMIT, WORST_LIMIT = 0.05, 0.10
HOST_WARMUP = (1, 2)
"""Shares of the emulated run that tells of this host: the first pair with another cut."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    quick: bool
    median_error: float
    worst_error: float
    closed_form_median_error: float
    closed_form_worst_error: float
    eq3_median_error: float
    eq3_worst_error: float
    results: tuple[Result, ...]
    skipped: tuple[str, ...]

    @property
    def good(self) -> bool:
        return self.median_error <= MEDIAN_LIMIT and self.worst_error <= WORST_LIMIT


def report(rows: Mapping[str, Result], quick: bool, skipped: Sequence[str]) -> Report:
    results = [rows[pair.key] for pair in PAIRS if pair.key in rows]
    simulated = [abs(r.error) for r in results]
    closed = [abs(r.closed_form_error) for r in results]
    eq3 = [abs(r.eq3_error) for r in results]
    return Report(
        host=machine(),
        quick=quick,
        median_error=statistics.median(simulated),
        worst_error=max(simulated),
        closed_form_median_error=statistics.median(closed),
        closed_form_worst_error=max(closed),
        eq3_median_error=statistics.median(eq3),
        eq3_worst_error=max(eq3),
        results=tuple(results),
        skipped=tuple(skipped),
    )


def results_of(pairs: Sequence[Pair], settings: Settings, notes: Console) -> Iterator[tuple[Pair, Result | str]]:
    """Each pair's result, or why it was skipped."""
    no_lab = lab_unavailable()
    emulation: Emulation | None = None
    for pair in pairs:
        notes.print(f"{pair.key} ...", highlight=False)
        if pair.kind == "network":
            yield pair, no_lab if no_lab is not None else network_result(pair, settings)
        else:
            emulation = emulation or Emulation(PAIRS[0], HOST_WARMUP, settings)
            yield pair, emulation.result(pair)


def table(found: Report) -> Table:
    drawn = Table("kind", "fleet x devices, model", "slowed by", title="Steady step: predicted against measured")
    for heading in ("measured", "simulator", "closed form", "Eq. 3", "late", "others"):
        drawn.add_column(heading, justify="right")
    for r in found.results:
        drawn.add_row(
            r.kind,
            r.pair,
            f"{r.slow:,.0f}" if r.slow > 1 else "-",
            f"{r.measured_s * 1e3:.0f} ms",
            f"{r.error:+.1%}",
            f"{r.closed_form_error:+.1%}",
            f"{r.eq3_error:+.1%}",
            f"{r.late_share:.1%}" if r.kind == "emulated" else "-",
            f"{r.others_cores:.2f}",
        )
    drawn.add_section()
    drawn.add_row(
        "",
        "median of |error|",
        "",
        "",
        f"{found.median_error:.1%}",
        f"{found.closed_form_median_error:.1%}",
        f"{found.eq3_median_error:.1%}",
    )
    drawn.add_row(
        "",
        "worst",
        "",
        "",
        f"{found.worst_error:.1%}",
        f"{found.closed_form_worst_error:.1%}",
        f"{found.eq3_worst_error:.1%}",
    )
    drawn.caption = "others: cores that other processes used meanwhile; late: by how much emulated tasklets overran"
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "two pairs of each kind, fewer steps")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait for a quiet host so long")
    parser.add_argument("--tries", type=int, default=3, help="runs of a plan until one was undisturbed")
    parser.add_argument("--only", type=int, nargs="*", metavar="N", help="pairs by their number, from 0")
    options = parser.parse_args()
    rows = kept_rows(options.json) if options.only is not None else {}
    skipped: list[str] = []
    chosen = options.only if options.only is not None else QUICK if options.quick else range(len(PAIRS))
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            steps=5 if options.quick else 10,
            warmup_steps=4 if options.quick else 7,
            tries=1 if options.quick else options.tries,
            timeout_s=options.timeout,
            folder=Path(folder),
        )
        notes = Console(stderr=True)
        for pair, result in results_of([PAIRS[i] for i in chosen], settings, notes):
            if isinstance(result, str):
                skipped.append(f"{pair.key}: {result}")
                continue
            notes.print(f"  measured {result.measured_s:.3f} s, simulated {result.error:+.1%}", highlight=False)
            rows[pair.key] = result
            found = report(rows, options.quick, skipped)
            write_figures(options.json, found)
    for why in skipped:
        print(f"skipped {why}", file=sys.stderr)
    if not rows:
        return 1
    found = report(rows, options.quick, skipped)
    Console(width=130).print(table(found))
    return 0 if found.good else 1


def kept_rows(path: Path) -> dict[str, Result]:
    """The rows that an earlier run left."""
    if not path.exists():
        return {}
    return {r.key: r for r in msgspec.json.decode(path.read_bytes(), type=Report).results}


if __name__ == "__main__":
    sys.exit(main())
