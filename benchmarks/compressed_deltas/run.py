"""Workers that exchange packed deltas now and then, against gradients averaged in every step.

`python benchmarks/compressed_deltas/run.py [--quick] [--fresh] [--json PATH]`. See README.md for what came out.

Every method has candidates for its rates: one seed decides between them, the others run the best alone. Runs that the
results file holds are not made again without `--fresh`. Ends with 1 where no method sends a hundredth of the bytes at
a loss at most 1 % higher.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from methods import METHODS
from replica import Method, Outcome, Setting

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
WORKERS, STEPS, QUICK_STEPS = 4, 360, 120
SEEDS = (0, 1, 2)
LEAST_SAVING, MOST_GAP = 100.0, 0.01


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A method at its best rates."""

    method: Method
    losses: list[float]
    """Held out, by seed."""
    sent_bytes: int
    """By one worker over its links, in all steps."""
    saving: float
    """Bytes of bfloat16 gradients in every step, over these."""
    gaps: list[float]
    """Against those gradients with the same seed, relative."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    workers: int
    outcomes: list[Outcome]
    rows: list[Row]


def run(settings: Sequence[Setting]) -> Iterator[Outcome]:
    """One after the other, in processes that are started once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_bytes(msgspec.json.encode(list(settings)))
        running = [
            subprocess.Popen(
                [sys.executable, str(HERE / "replica.py"), str(rank), str(WORKERS), f"{folder}/store", str(file)],
                stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(WORKERS)
        ]  # fmt: skip
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
        self._known = {msgspec.json.encode(outcome.setting): outcome for outcome in kept}

    def of(self, settings: Sequence[Setting]) -> list[Outcome]:
        missing = [s for s in settings if msgspec.json.encode(s) not in self._known]
        for outcome in run(missing) if missing else ():
            self._known[msgspec.json.encode(outcome.setting)] = outcome
            print(f"{told(outcome.setting.method)}, seed {outcome.setting.seed}: {outcome.loss:.4f}", file=sys.stderr)
            self.write([])
        return [self._known[msgspec.json.encode(s)] for s in settings]

    def write(self, rows: list[Row]) -> None:
        report = Report(
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", workers=WORKERS,
            outcomes=list(self._known.values()), rows=rows,
        )  # fmt: skip
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


def told(method: Method) -> str:
    outer = "" if method.period == 1 else f", outer rate {method.outer_rate:g}, momentum {method.outer_momentum:g}"
    return f"{method.name}, rate {method.rate:g}{outer}"


def tuned(candidates: Sequence[Method], found: Sequence[Outcome]) -> Method:
    """The candidate with the lowest loss."""
    return min(zip(candidates, found, strict=True), key=lambda pair: pair[1].loss)[0]


def rows_of(by_method: Sequence[Sequence[Outcome]]) -> list[Row]:
    """The first is what the others are measured by."""
    base = [outcome.loss for outcome in by_method[0]]
    return [
        Row(
            method=of[0].setting.method, losses=[o.loss for o in of], sent_bytes=of[0].sent_bytes,
            saving=by_method[0][0].sent_bytes / of[0].sent_bytes,
            gaps=[o.loss / b - 1 for o, b in zip(of, base, strict=True)],
        )
        for of in by_method
    ]  # fmt: skip


def table(rows: Sequence[Row], steps: int) -> Table:
    drawn = Table("exchange", title=f"{WORKERS} workers, {steps} steps")
    for heading in ("rates: inner, outer, momentum", "MB sent", "fewer bytes", "held-out loss", "gap"):
        drawn.add_column(heading, justify="right")
    for row in rows:
        method = row.method
        outer = "" if method.period == 1 else f", {method.outer_rate:g}, {method.outer_momentum:g}"
        drawn.add_row(
            method.name, f"{method.rate:g}{outer}", f"{row.sent_bytes / 1e6:.2f}", f"{row.saving:.0f}x",
            f"{statistics.fmean(row.losses):.4f} ± {statistics.pstdev(row.losses):.4f}",
            f"{statistics.fmean(row.gaps):+.2%} ± {statistics.pstdev(row.gaps):.2%}",
        )  # fmt: skip
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="first rates only, one seed, a third of the steps")
    parser.add_argument("--fresh", action="store_true", help="make all runs again")
    parser.add_argument("--json", type=Path, default=LATEST, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    methods = [candidates[:1] for candidates in METHODS] if options.quick else METHODS
    seeds, steps = (SEEDS[:1], QUICK_STEPS) if options.quick else (SEEDS, STEPS)
    runs = Runs(options.json, fresh=options.fresh)
    first = runs.of([Setting(method=m, seed=seeds[0], steps=steps) for of in methods for m in of])
    places = iter(first)
    best = [tuned(of, [next(places) for _ in of]) for of in methods]
    found = runs.of([Setting(method=m, seed=seed, steps=steps) for m in best for seed in seeds])
    rows = rows_of([found[n : n + len(seeds)] for n in range(0, len(found), len(seeds))])
    runs.write(rows)
    Console(width=130).print(table(rows, steps))
    return 0 if any(r.saving >= LEAST_SAVING and statistics.fmean(r.gaps) <= MOST_GAP for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
