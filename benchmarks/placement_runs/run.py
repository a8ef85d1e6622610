"""One emulated training run per placement planner: what its plan promises, what the run takes, and equality.

`python benchmarks/placement_runs/run.py [--quick] [--only PLANNER ...] [--json PATH]`

The same small GPT is trained over six emulated devices under every planner's plan. Ends with 1 unless each run equals
the plain loop to 1e-6 and its steady step is within 10 % of what plan and simulator say.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from workload import Plain, fleet, job, plain

from isthmus.experiments import (
    Item,
    RunOptions,
    Watcher,
    check_outcome,
    latest_checkpoint,
    read_tensors,
    run_plan,
    run_spec,
)
from isthmus.fleet import Fleet
from isthmus.job import Prepared, prepare
from isthmus.planners import plan as plan_by
from isthmus.simulator import simulate
from isthmus.trace import Span, Trace, steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
PLANNERS = ("random", "dtfm-kl", "dtfm-genetic", "op-fence", "chain", "auto")
TIME_LIMIT, EQUAL = 0.10, 1e-6
STEPS, QUICK_STEPS = 6, 3


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Errors of times are relative to the measured step."""

    planner: str
    stages: tuple[int, ...]
    """Of each replica."""
    shares: tuple[int, ...]
    """Micro-batches of each replica."""
    measured_s: float
    simulated_s: float
    closed_form_s: float
    loss_error: float
    """Largest over the steps, relative to the plain loop's."""
    weight_error: float
    """Largest over the parameters, of the norms, after the last step."""
    late_share: float
    """By how much emulated tasklets overran, of the run's time: the host was too slow for them."""

    @property
    def simulated_error(self) -> float:
        return self.simulated_s / self.measured_s - 1

    @property
    def closed_form_error(self) -> float:
        return self.closed_form_s / self.measured_s - 1

    @property
    def good(self) -> bool:
        in_time = max(abs(self.simulated_error), abs(self.closed_form_error)) <= TIME_LIMIT
        return in_time and max(self.loss_error, self.weight_error) <= EQUAL


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    steps: int
    results: tuple[Result, ...]


def measure(planner: str, prepared: Prepared, devices: Fleet, expected: Plain, folder: Path) -> Result:
    made = plan_by(planner, prepared.problem(devices))
    losses: list[float] = []

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train" and loss is not None:
            losses.append(loss)

    outcome = run_plan(prepared, made, devices, folder, RunOptions(), Watcher(advanced=advanced))
    check_outcome(outcome)
    run = Trace(source="runtime", run=planner, spans=outcome.spans)
    saved = read_tensors(latest_checkpoint(folder / "checkpoints"))
    return Result(
        planner=planner,
        stages=tuple(len(replica.stages) for replica in made.replicas),
        shares=tuple(replica.micro_batches for replica in made.replicas),
        measured_s=steady_step_s(run),
        closed_form_s=made.predicted.step_s,
        simulated_s=steady_step_s(simulate(made, devices, run_spec(prepared))),
        loss_error=max(abs(a / b - 1) for a, b in zip(losses, expected.losses, strict=True)),
        weight_error=max(
            float((saved[name].double() - weight.double()).norm() / weight.double().norm())
            for name, weight in expected.weights.items()
        ),
        late_share=max(outcome.late_s.values()) / max(span.end_s for span in outcome.spans),
    )


def table(results: Sequence[Result]) -> Table:
    drawn = Table("planner", "stages", title="Emulated runs: steady step, measured against predicted")
    for heading in ("shares", "measured", "simulator", "closed form", "loss", "weights", "late"):
        drawn.add_column(heading, justify="right")
    for r in results:
        drawn.add_row(
            r.planner,
            " + ".join(map(str, r.stages)),
            " + ".join(map(str, r.shares)),
            f"{r.measured_s * 1e3:.0f} ms",
            f"{r.simulated_error:+.1%}",
            f"{r.closed_form_error:+.1%}",
            f"{r.loss_error:.0e}",
            f"{r.weight_error:.0e}",
            f"{r.late_share:.1%}",
        )
    drawn.caption = "loss, weights: largest relative difference from the plain loop"
    return drawn


def report(steps: int, results: Sequence[Result]) -> Report:
    return Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        steps=steps,
        results=tuple(results),
    )


def main() -> int:
    parser = options_of(__doc__, LATEST, f"{QUICK_STEPS} steps in place of {STEPS}")
    parser.add_argument("--only", nargs="*", choices=PLANNERS, default=PLANNERS, metavar="PLANNER", help="these only")
    options = parser.parse_args()
    steps = QUICK_STEPS if options.quick else STEPS
    prepared, devices = prepare(job(steps)), fleet()
    expected, results = plain(prepared), list[Result]()
    for planner in options.only:
        print(f"{planner} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(planner, prepared, devices, expected, Path(folder)))
        options.json.parent.mkdir(exist_ok=True)
        write_figures(options.json, report(steps, results))
    Console(width=120).print(table(results))
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
