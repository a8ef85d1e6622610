"""Workers that exchange packed deltas now and then, against gradients averaged in every step.

`python benchmarks/compressed_deltas/run.py [--quick] [--fresh] [--again ROWS] [--json PATH]`. What came out: README.md.

Every method has candidates for its rates: one seed decides between them, the others run the best alone. Runs that the
results file holds are not made again without `--fresh`, or `--again` for the first rows alone. Ends with 1 where no
method sends a hundredth of the bytes at a loss at most 1 % higher.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from methods import COMPARED, STEPS, Compared
from replica import Method, Outcome, Setting
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
SEEDS = (0, 1, 2)
LEAST_SAVING, MOST_GAP = 100.0, 0.01


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A method at its best rates."""

    method: Method
    start: int
    workers: int
    losses: list[float]
    """Held out, by seed."""
    sent_bytes_per_step: float
    """By one worker over its links since the start."""
    saving: float
    """Bytes of as many workers' bfloat16 gradients in every step, over these."""
    gaps: list[float]
    """Against those gradients with the same seed, relative."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    outcomes: list[Outcome]
    rows: list[Row]


def run(settings: Sequence[Setting], workers: int) -> Iterator[Outcome]:
    """One after the other, in processes that are started once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_bytes(msgspec.json.encode(list(settings)))
        running = [
            subprocess.Popen(
                [sys.executable, str(HERE / "replica.py"), str(rank), str(workers), f"{folder}/store", str(file)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(workers)
        ]
        try:
            assert running[0].stdout is not None
            for line in running[0].stdout:
                yield msgspec.json.decode(line, type=Outcome)
            for process in running:
                process.wait(60)
        finally:
            for process in running:
                process.kill()
                process.wait()


class Runs:
    """Outcomes by setting, in a file that grows with each."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        kept = [] if fresh or not path.exists() else msgspec.json.decode(path.read_bytes(), type=Report).outcomes
        self._known = {outcome.setting: outcome for outcome in kept}

    def forget(self, settings: Sequence[Setting]) -> None:
        for setting in settings:
            self._known.pop(setting, None)

    def of(self, settings: Sequence[Setting]) -> list[Outcome]:
        for workers in sorted({setting.workers for setting in settings}):
            missing = [s for s in settings if s.workers == workers and s not in self._known]
            # Seeds together: what precedes a start is computed once for each.
            for outcome in run(sorted(missing, key=lambda s: s.seed), workers) if missing else ():
                self._known[outcome.setting] = outcome
                print(f"{told(outcome.setting)}: {outcome.loss:.4f}", file=sys.stderr)
                self.write([])
        return [self._known[s] for s in settings]

    def write(self, rows: list[Row]) -> None:
        report = Report(
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            host=machine(),
            outcomes=list(self._known.values()),
            rows=rows,
        )
        write_figures(self._path, report)


def told(setting: Setting) -> str:
    method = setting.method
    return (
        f"{setting.workers} workers from step {setting.start}, {method.name}, rates {rates(method)}, "
        f"seed {setting.seed}"
    )


def rates(method: Method) -> str:
    outer = "" if method.period == 1 else f", {method.outer_rate:g}, {method.outer_momentum:g}"
    return f"{method.rate:g}{outer}"


def tuned(of: Compared, steps: int, runs: Runs) -> Compared:
    """With the candidate alone that has the lowest loss with the first seed."""
    if len(of.candidates) == 1:
        return of
    found = runs.of(settings(of, SEEDS[:1], steps))
    best = min(zip(of.candidates, found, strict=True), key=lambda pair: pair[1].loss)[0]
    return msgspec.structs.replace(of, candidates=[best])


def settings(of: Compared, seeds: Sequence[int], steps: int) -> list[Setting]:
    return [
        Setting(method=m, seed=seed, start=of.start * steps // STEPS, steps=steps, workers=of.workers)
        for m in of.candidates
        for seed in seeds
    ]


def rows_of(by_method: Sequence[Sequence[Outcome]]) -> list[Row]:
    """The first is what the others are measured by."""
    base = [outcome.loss for outcome in by_method[0]]
    return [_row(of, base) for of in by_method]


def _row(of: Sequence[Outcome], base: Sequence[float]) -> Row:
    setting = of[0].setting
    sent_bytes_per_step = of[0].sent_bytes / (setting.steps - setting.start)
    # In a ring, two bytes a parameter.
    gradient_bytes = 2 * of[0].parameters * 2 * (setting.workers - 1) / setting.workers
    return Row(
        method=setting.method,
        start=setting.start,
        workers=setting.workers,
        losses=[o.loss for o in of],
        sent_bytes_per_step=sent_bytes_per_step,
        saving=gradient_bytes / sent_bytes_per_step,
        gaps=[o.loss / b - 1 for o, b in zip(of, base, strict=True)],
    )


def table(rows: Sequence[Row], steps: int) -> Table:
    drawn = Table("exchange", title=f"{steps} steps")
    for heading in (
        "from step",
        "workers",
        "rates: inner, outer, momentum",
        "bytes a step",
        "fewer",
        "held-out loss",
        "gap",
    ):
        drawn.add_column(heading, justify="right")
    for row in rows:
        drawn.add_row(
            row.method.name,
            str(row.start),
            str(row.workers),
            rates(row.method),
            f"{row.sent_bytes_per_step:,.0f}",
            f"{row.saving:.0f}x",
            f"{statistics.fmean(row.losses):.4f} ± {statistics.pstdev(row.losses):.4f}",
            f"{statistics.fmean(row.gaps):+.2%} ± {statistics.pstdev(row.gaps):.2%}",
        )
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "first rates only, one seed, a fifth of the steps")
    parser.add_argument("--fresh", action="store_true", help="make all runs again")
    parser.add_argument("--again", type=int, default=0, metavar="ROWS", help="run the first rows anew")
    options = parser.parse_args()
    seeds, steps = (SEEDS[:1], STEPS // 5) if options.quick else (SEEDS, STEPS)
    runs = Runs(options.json, fresh=options.fresh)
    if options.quick:
        best = [msgspec.structs.replace(of, candidates=of.candidates[:1]) for of in COMPARED]
    else:
        runs.of([setting for of in COMPARED for setting in settings(of, SEEDS[:1], steps)])
        best = [tuned(of, steps, runs) for of in COMPARED]
    runs.forget([setting for of in best[: options.again] for setting in settings(of, seeds, steps)])
    found = runs.of([setting for of in best for setting in settings(of, seeds, steps)])
    rows = rows_of([found[n : n + len(seeds)] for n in range(0, len(found), len(seeds))])
    runs.write(rows)
    Console(width=130).print(table(rows, steps))
    return 0 if any(r.saving >= LEAST_SAVING and statistics.fmean(r.gaps) <= MOST_GAP for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
