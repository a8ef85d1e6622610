"""Proven gaps: how far the plans of `auto` are above what is proven of any plan, by the size of the fleet.

`python benchmarks/proven_gaps/run.py [--quick] [--problems N] [--seconds S] [--most N] [--json PATH]`

Random problems of two generators, each planned, its bound raised for so many seconds of one processor, and checked
again. Two fleets in three are those of `benchmarks/auto`; the others are regions of devices that are alike
(`fleets.py`). The figures are written after each problem; a run that was ended is continued.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))

from fleets import sized_problem

from harness import machine, options_of, write_figures
from isthmus.api.proof import PROVING, Proving, as_proven, question_of
from isthmus.errors import UserError
from isthmus.planners import plan as make_plan
from isthmus.verification import MOST_WORK, verify

LATEST = Path(__file__).parent / "results" / "latest.json"
SIZES = ((2, 6), (7, 8), (9, 16), (17, 64))
GOALS = (0.0, 0.02, 0.10, 0.25)
PROBLEMS, SECONDS = 100, 60.0
QUICK_PROBLEMS, QUICK_SECONDS = 4, 5.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One problem."""

    seed: int
    size: tuple[int, int]
    devices: int
    blocks: int
    replicas: int
    plan_s: float
    prove_s: float
    gap: float
    verified: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    seconds: float
    rows: tuple[Row, ...] = ()
    unfit: tuple[tuple[int, tuple[int, int]], ...] = ()
    """Seeds and sizes at which nothing fits."""

    def has(self, seed: int, size: tuple[int, int]) -> bool:
        return (seed, size) in self.unfit or any((r.seed, r.size) == (seed, size) for r in self.rows)


OFTEN = 2_000_000
"""Entries of arrays, about a hundredth of a second."""


class ProcessorTime(Proving):
    """So many seconds of this process, however much else the machine does."""

    def ended(self) -> Callable[[int], bool]:
        start_s, asked_at, over = time.process_time(), 0, False

        def ended(work: int) -> bool:
            nonlocal asked_at, over
            if work >= asked_at:  # the processor's time is slow to ask for
                asked_at = work + OFTEN
                over = time.process_time() - start_s > (self.seconds or 0.0) or work > PROVING * MOST_WORK
            return over

        return ended


def row(seed: int, size: tuple[int, int], seconds: float) -> Row | None:
    """None where nothing fits."""
    problem = sized_problem(seed, *size)
    start_s = time.perf_counter()
    try:
        plan = make_plan("auto", problem)
    except UserError:
        return None
    planned_s, start_prove_s = time.perf_counter(), time.process_time()
    counts = (problem.micro_batches,)
    proven = as_proven(problem, plan, counts, ProcessorTime(seconds))
    prove_s = time.process_time() - start_prove_s
    certificate = proven.certificate
    verdict = verify(proven, question_of(problem, counts))
    return Row(
        seed=seed,
        size=size,
        devices=len(problem.fleet.names),
        blocks=len(problem.flow.operators),
        replicas=len(plan.replicas),
        plan_s=planned_s - start_s,
        prove_s=prove_s,
        gap=float("inf") if certificate is None else certificate.gap,
        verified=verdict.holds(),
    )


def table(found: Report) -> Table:
    drawn = Table("devices", title=f"proven gaps, {found.seconds:g} s of proof each")
    headings = ("planned", "median", "90th percentile", "largest", "goal", "median s", "not verified")
    for heading in headings:
        drawn.add_column(heading, justify="right")
    for size, goal in zip(SIZES, GOALS, strict=True):
        rows = [r for r in found.rows if r.size == size]
        if rows:
            gaps = sorted(r.gap for r in rows)
            drawn.add_row(
                f"{size[0]}-{size[1]}",
                str(len(rows)),
                f"{statistics.median(gaps):.1%}",
                f"{gaps[min(len(gaps) - 1, int(0.9 * len(gaps)))]:.1%}",
                f"{gaps[-1]:.1%}",
                f"{goal:.0%}",
                f"{statistics.median(r.prove_s for r in rows):.1f}",
                str(sum(not r.verified for r in rows)),
            )
    return drawn


class Asked(NamedTuple):
    problems: int
    seconds: float
    most: int | None
    """Problems that are looked at in this run."""
    path: Path


def asked_of(arguments: Sequence[str] | None = None) -> Asked:
    parser = options_of(__doc__, LATEST, f"{QUICK_PROBLEMS} problems per size, {QUICK_SECONDS:g} s each")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="per size")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a processor, each proof")
    parser.add_argument("--most", type=int, default=None, help="new problems in this run; all")
    options = parser.parse_args(arguments)
    if options.quick:
        return Asked(QUICK_PROBLEMS, QUICK_SECONDS, options.most, options.json)
    return Asked(options.problems, options.seconds, options.most, options.json)


def begun(path: Path, seconds: float) -> Report:
    """What an earlier run with the same time left, or an empty report."""
    if path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=Report)
        if found.seconds == seconds:
            return found
    return Report(when=datetime.now(UTC).isoformat(timespec="seconds"), host=machine(), seconds=seconds)


def main() -> int:
    problems, seconds, most, path = asked_of()
    found = begun(path, seconds)
    every = ((seed, size) for seed in range(problems) for size in SIZES)
    for seed, size in itertools.islice((one for one in every if not found.has(*one)), most):
        one = row(seed, size, seconds)
        if one is None:
            found = msgspec.structs.replace(found, unfit=(*found.unfit, (seed, size)))
        else:
            found = msgspec.structs.replace(found, rows=(*found.rows, one))
            text = f"{one.devices} devices: {one.gap:.1%}, {one.prove_s:.1f} s"
            print(f"{seed} {text} {'' if one.verified else 'NOT VERIFIED'}", file=sys.stderr, flush=True)
        write_figures(path, found)
    Console(width=150).print(table(found))
    return 0 if all(r.verified for r in found.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
