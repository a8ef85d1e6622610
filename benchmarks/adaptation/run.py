"""Adaptation: a link drops tenfold or a device slows down fourfold in mid-run. How good is the plan that follows?

`python benchmarks/adaptation/run.py [--quick] [--json PATH]`

On the virtual clock: the first plan runs on the changed fleet, its spans are read as the coordinator reads them, and
the plan that is made with what is believed then is compared with one made for the changed fleet from the start. For
real, over emulated processes: the same in one run, with the change in its middle.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from cases import Case, changes, job, prepared_for, thinned_fleet, triangle
from rich.console import Console
from rich.table import Table

from isthmus.experiments import RunOptions, Watcher, plan_for, run_plan, run_spec
from isthmus.fleet import Fleet, changed
from isthmus.job import Prepared
from isthmus.plans import Plan
from isthmus.protocol.drift import LAG_STEPS, STEPS, Drift
from isthmus.simulator import simulate
from isthmus.trace import Trace, steady_step_s, step_times

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
LIMIT = 1.10
BUILT_IN = (("three-sites", 4), ("dtfm-case4", 6), ("fluidstack", 5))
STEPS_REAL, CHANGE_AT, LAST = 40, 10, 8
"""Of a real run: how long it is, when the change comes, and over how many of the last steps the median is taken."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    where: str
    """virtual clock, or processes"""
    case: str
    before_s: float
    unadapted_s: float
    """The first plan on the changed fleet."""
    adapted_s: float
    """The plan that the run changed to."""
    planned_s: float
    """The plan made for the changed fleet from the start."""
    noticed_steps: int
    """From the change until the new figures were believed."""
    pause_s: float = 0.0
    redone: int = 0
    late_share: float = 0.0

    @property
    def ratio(self) -> float:
        return self.adapted_s / self.planned_s


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    worst: float
    rows: tuple[Row, ...]


def on_the_virtual_clock(prepared: Prepared, case: Case) -> Row:
    before = case.fleet
    plan = plan_for(prepared, before)
    after = changed(before, changes(case.kind, plan, before, 0), 0)
    spec = msgspec.structs.replace(run_spec(prepared), steps=60)
    drift, noticed = Drift(before), 0
    drift.begin(plan, -1)
    spans = simulate(plan, after, spec).spans
    for step in range(spec.steps):
        if drift.note(step, [s for s in spans if s.step == step]):
            noticed = step + 1
    found = plan_for(prepared, drift.fleet())
    return Row(
        where="virtual clock",
        case=case.name,
        before_s=_simulated_s(prepared, plan, before),
        unadapted_s=_simulated_s(prepared, plan, after),
        adapted_s=_simulated_s(prepared, found, after),
        planned_s=_simulated_s(prepared, plan_for(prepared, after), after),
        noticed_steps=noticed,
    )


def _simulated_s(prepared: Prepared, plan: Plan, fleet: Fleet) -> float:
    return steady_step_s(simulate(plan, fleet, msgspec.structs.replace(run_spec(prepared), steps=5)))


def over_processes(prepared: Prepared, case: Case) -> Row:
    plan = plan_for(prepared, case.fleet)
    planned = changes(case.kind, plan, case.fleet, CHANGE_AT)
    runtime = msgspec.structs.replace(prepared.job.runtime, changes=planned)
    disturbed = msgspec.structs.replace(prepared, job=msgspec.structs.replace(prepared.job, runtime=runtime))
    after = changed(case.fleet, planned, CHANGE_AT)
    short = msgspec.structs.replace(
        prepared, job=msgspec.structs.replace(prepared.job, training=job(LAST + 3).training)
    )
    noted: list[tuple[int, str]] = []
    options = RunOptions(replan=partial(plan_for, prepared))
    trace, pause, late_share = _run(disturbed, plan, case.fleet, options, noted)
    times = step_times(trace)
    rest, _, _ = _run(short, plan, after, RunOptions(), [])
    fresh, _, _ = _run(short, plan_for(prepared, after), after, RunOptions(), [])
    believed = [step for step, text in noted if ", not " in text]
    return Row(
        where="processes",
        case=case.name,
        before_s=statistics.median(times[s] for s in range(2, CHANGE_AT) if s in times),
        unadapted_s=_last_s(rest),
        adapted_s=_last_s(trace),
        planned_s=_last_s(fresh),
        noticed_steps=max(believed, default=CHANGE_AT - 1) + 1 - CHANGE_AT,
        pause_s=pause[0],
        redone=pause[1],
        late_share=late_share,
    )


def _last_s(trace: Trace) -> float:
    """Median of the last steps, but for the very last one."""
    times = sorted(step_times(trace).items())[:-1]
    return statistics.median(seconds for _, seconds in times[-LAST:])


def _run(
    prepared: Prepared, plan: Plan, fleet: Fleet, options: RunOptions, noted: list[tuple[int, str]]
) -> tuple[Trace, tuple[float, int], float]:
    reached = [0]

    def advanced(item: object, loss: object, spans: object) -> None:
        if getattr(item, "kind", "") == "train":
            reached[0] = item.step  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory() as folder:
        watcher = Watcher(advanced=advanced, noted=lambda text: noted.append((reached[0], text)))
        outcome = run_plan(prepared, plan, fleet, Path(folder), options, watcher)
    for step, text in noted:
        print(f"  step {step}: {text}", file=sys.stderr)
    assert outcome.outcome == "done", outcome.reason
    pause = sum(r.seconds for r in outcome.recoveries), sum(r.redone for r in outcome.recoveries)
    late_share = max(outcome.late_s.values()) / outcome.elapsed_s
    return Trace(source="runtime", run="adaptation", spans=outcome.spans), pause, late_share


def table(found: Report) -> Table:
    drawn = Table("where", "case", title="Step time before a change, after it, and after adaptation")
    for heading in ("before", "not adapted", "adapted", "planned anew", "ratio", "noticed", "pause", "redone", "late"):
        drawn.add_column(heading, justify="right")
    for r in found.rows:
        drawn.add_row(
            r.where,
            r.case,
            *(f"{s * 1e3:.0f} ms" for s in (r.before_s, r.unadapted_s, r.adapted_s, r.planned_s)),
            f"{r.ratio:.3f}",
            f"{r.noticed_steps} steps",
            f"{r.pause_s:.1f} s",
            str(r.redone),
            f"{r.late_share:.1%}",
        )
    drawn.caption = "ratio: adapted / planned for the changed fleet from the start"
    return drawn


def cases(prepared: Prepared, *, quick: bool) -> Sequence[Case]:
    fleets = [triangle(prepared)]
    if not quick:
        fleets += [thinned_fleet(name, count, prepared) for name, count in BUILT_IN]
    named = (("link", "fastest link / 10"), ("device", "fastest device / 4"))
    return [
        Case(f"{f.name} x {len(f.names)}: {text}", kind, f)  # type: ignore[arg-type]
        for f in fleets
        for kind, text in named
    ]


def main() -> int:
    parser = options_of(__doc__, LATEST, "three devices, on the virtual clock only")
    options = parser.parse_args()
    prepared = prepared_for(STEPS_REAL)
    chosen = cases(prepared, quick=options.quick)
    rows = [on_the_virtual_clock(prepared, case) for case in chosen]
    for case in () if options.quick else chosen[:2]:
        print(f"{case.name} ...", file=sys.stderr)
        rows.append(over_processes(prepared, case))
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        worst=max(r.ratio for r in rows),
        rows=tuple(rows),
    )
    write_figures(options.json, found)
    Console(width=150).print(table(found))
    quick_enough = all(r.noticed_steps <= STEPS + LAG_STEPS + 3 for r in rows)
    return 0 if found.worst <= LIMIT and quick_enough else 1


if __name__ == "__main__":
    sys.exit(main())
