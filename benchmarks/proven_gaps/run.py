"""Proven gaps: how far the plans of `auto` are above what is proven of any plan, by the size of the fleet.

`python benchmarks/proven_gaps/run.py [--quick] [--problems N] [--seconds S] [--most N] [--captured] [--json PATH]`

Random problems of two generators, each planned, its bound raised for so many seconds of one processor, and checked
again. Two fleets in three are those of `benchmarks/auto`; the others are regions of devices that are alike
(`fleets.py`). The figures are written after each problem; a run that was ended is continued.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))

from fleets import CAPTURED, sized_problem

from harness import machine, options_of, write_figures
from isthmus.api.make_plan import PROVING_WORK, certificate_of, question_of
from isthmus.errors import UserError
from isthmus.experiments import RunSpec
from isthmus.planners import plan as make_plan
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s
from isthmus.verification import Prover, verify

LATEST = Path(__file__).parent / "results" / "latest.json"
SIZES = ((2, 6), (7, 8), (9, 16), (17, 64))
GOALS = (0.0, 0.02, 0.10, 0.25)
SCORED_STEPS, STEPS = 2, 8  # of a simulation, while planning and of the plan
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


def row(seed: int, size: tuple[int, int], seconds: float) -> Row | None:
    """None where nothing fits."""
    problem = sized_problem(seed, *size)
    start_s = time.perf_counter()

    def simulated_s(plan: Plan, steps: int = SCORED_STEPS) -> float:
        spec = RunSpec(steps=steps, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)
        return steady_step_s(simulate(plan, problem.fleet, spec))

    try:
        plan = make_plan("auto", problem, simulated_s)
    except UserError:
        return None
    predicted = msgspec.structs.replace(plan.predicted, steady_s=simulated_s(plan, STEPS))
    plan = msgspec.structs.replace(plan, predicted=predicted)
    planned_s, start_prove_s = time.perf_counter(), time.process_time()
    question, reached = question_of(problem, (problem.micro_batches,)), plan.predicted.steady_s

    def ended() -> bool:
        return time.process_time() - start_prove_s > seconds

    bound_s = Prover(question, priced=False).run(reached, PROVING_WORK, ended, lambda _: None)
    prove_s = time.process_time() - start_prove_s
    certificate = certificate_of(question, reached, bound_s)
    verdict = verify(msgspec.structs.replace(plan, certificate=certificate), question)
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
    seeds: range
    seconds: float
    most: int | None
    """Problems that are looked at in this run."""
    path: Path


def asked_of(arguments: Sequence[str] | None = None) -> Asked:
    parser = options_of(__doc__, LATEST, f"{QUICK_PROBLEMS} problems per size, {QUICK_SECONDS:g} s each")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="per size")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a processor, each proof")
    parser.add_argument("--most", type=int, default=None, help="new problems in this run; all")
    parser.add_argument("--captured", action="store_true", help="captured models; goals 0, 2, 15 and 35 %%")
    options = parser.parse_args(arguments)
    count, seconds = (QUICK_PROBLEMS, QUICK_SECONDS) if options.quick else (options.problems, options.seconds)
    first = CAPTURED if options.captured else 0
    path = LATEST.with_name("captured.json") if options.captured and options.json == LATEST else options.json
    return Asked(range(first, first + count), seconds, options.most, path)


def begun(path: Path, seconds: float) -> Report:
    """What an earlier run with the same time left, or an empty report."""
    if path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=Report)
        if found.seconds == seconds:
            return found
    return Report(when=datetime.now(UTC).isoformat(timespec="seconds"), host=machine(), seconds=seconds)


def main() -> int:
    seeds, seconds, most, path = asked_of()
    found = begun(path, seconds)
    every = ((seed, size) for seed in seeds for size in SIZES)
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
