"""auto: how near to the best plan, how it does beside the other planners, and what it proves.

`python benchmarks/auto/run.py [--quick] [--json PATH]`

200 random problems of at most 5 devices and 10 units against brute force, and 200 of 2 to 64 devices against the best
of the other planners. Every plan of `auto` is verified with code that no planner uses.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from brute import best_step_s, question_of
from cases import large_case, small_case
from rich.console import Console
from rich.table import Table

from isthmus.cost import Problem
from isthmus.errors import UserError
from isthmus.planners import plan as make_plan
from isthmus.planners import planner_names
from isthmus.plans import Plan
from isthmus.verification import verify

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
CASES, QUICK_CASES = 200, 12
SLOW = {"sky-optimal": 4, "dtfm-genetic": 10, "dtfm-kl": 10}
"""Devices up to which a slow planner is asked: beyond, it takes most of a minute."""
ROUNDING = 1e-9
NEAR_BRUTE = 1.02
SIZES = ((2, 5), (6, 8), (9, 16), (17, 32), (33, 64))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    devices: int
    model: str
    units: int
    micro_batches: int
    schedule: str
    plan_s: float
    step_s: float | None
    """None where nothing fits."""
    replicas: int = 0
    reference_s: float | None = None
    """Of brute force, or of the best other planner."""
    reference: str = ""
    verified: bool = True

    @property
    def ratio(self) -> float | None:
        """To the reference; infinite where only the reference found a plan, 0 where only `auto` did."""
        if self.reference_s is None:
            return None if self.step_s is None else 0.0
        return math.inf if self.step_s is None else self.step_s / self.reference_s


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    small: tuple[Row, ...]
    large: tuple[Row, ...]

    @property
    def good(self) -> bool:
        rows = (*self.small, *self.large)
        return worst(self.small) <= NEAR_BRUTE and worst(self.large) <= 1 + ROUNDING and all(r.verified for r in rows)


def worst(rows: Sequence[Row]) -> float:
    return max((r.ratio for r in rows if r.ratio is not None), default=0.0)


def small_row(seed: int) -> Row:
    problem = small_case(seed)
    row = _row(seed, problem)
    best_s = best_step_s(problem)
    return msgspec.structs.replace(row, reference="brute force", reference_s=best_s if best_s < math.inf else None)


def large_row(seed: int) -> Row:
    row, best_s, best = _row(seed, large_case(seed)), math.inf, ""
    for name in planner_names():
        if name == "auto" or row.devices > SLOW.get(name, row.devices):
            continue
        try:
            step_s = make_plan(name, large_case(seed)).predicted.step_s
        except UserError:
            continue
        if step_s < best_s:
            best_s, best = step_s, name
    return msgspec.structs.replace(row, reference=best, reference_s=best_s if best else None)


def _row(seed: int, problem: Problem) -> Row:
    start_s = time.perf_counter()
    try:
        plan: Plan | None = make_plan("auto", problem)
    except UserError:
        plan = None
    row = Row(
        seed=seed,
        devices=len(problem.fleet.names),
        model=problem.flow.graph.name,
        units=len(problem.flow.operators),
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        plan_s=time.perf_counter() - start_s,
        step_s=None,
    )
    if plan is None:
        return row
    verdict = verify(plan, question_of(problem))
    return msgspec.structs.replace(
        row,
        step_s=plan.predicted.step_s,
        replicas=len(plan.replicas),
        verified=verdict.holds(),
    )


def table(found: Report) -> Table:
    drawn = Table("problems", title="auto beside brute force and beside the other planners")
    for heading in (
        "number",
        "planned",
        "worst ratio",
        "median ratio",
        "not verified",
        "median time",
        "longest time",
    ):
        drawn.add_column(heading, justify="right")
    _add(drawn, "<= 5 devices, to brute force", found.small)
    _add(drawn, "2-64 devices, to best other", found.large)
    for low, high in SIZES:
        _add(drawn, f"  of {low}-{high}", [r for r in found.large if low <= r.devices <= high])
    drawn.caption = "ratio: step time to the reference; planned: the others fit no way"
    return drawn


def _add(drawn: Table, name: str, rows: Sequence[Row]) -> None:
    planned = [r for r in rows if r.step_s is not None]
    if not planned:
        return
    ratios = [r.ratio for r in planned if r.ratio]
    drawn.add_row(
        name,
        str(len(rows)),
        str(len(planned)),
        f"{worst(rows):.6f}",
        f"{statistics.median(ratios):.3f}",
        str(sum(not r.verified for r in planned)),
        f"{statistics.median(r.plan_s for r in planned):.2f} s",
        f"{max(r.plan_s for r in planned):.1f} s",
    )


def main() -> int:
    parser = options_of(__doc__, LATEST, f"{QUICK_CASES} problems of each kind")
    options = parser.parse_args()
    cases = QUICK_CASES if options.quick else CASES
    small, large = list[Row](), list[Row]()
    for seed in range(cases):
        small.append(small_row(seed))
        large.append(large_row(seed))
        print(f"{seed + 1} of {cases}: {small[-1].ratio} {large[-1].ratio}", file=sys.stderr)
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        small=tuple(small),
        large=tuple(large),
    )
    write_figures(options.json, found)
    Console(width=170).print(table(found))
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
