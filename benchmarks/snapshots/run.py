"""Snapshots: what copies of the devices' state in each other's memory cost a run.

`python benchmarks/snapshots/run.py [--quick] [--json PATH]`

The same run with snapshots and without, in turns: two emulated devices joined by 100 Mbit/s, more than 50 MB of weights
and optimizer state. What counts is the time of a step with everything that comes between steps. A machine that is busy
for a moment delays one step: with snapshots the medians of the first, second, ... step after a snapshot count, over all
runs, and their mean; without, the median of all steps.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import Item, RunOptions, Watcher, check_outcome, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.trace import Span, Trace, step_times

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
LIMIT = 0.03
STAGE_S = 0.3
"""Half of the model for one micro-batch on an emulated device: more than a core of this kind needs."""
LINK = Link(0.005, 100e6 / 8)
MODEL = ModelSpec(name="gpt", options={"vocab_size": 256, "sequence_length": 64, "width": 288, "layers": 5, "heads": 4})
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": 200_000})


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    steps: int
    state_bytes: int
    """Of both devices."""
    every: int
    """Steps from snapshot to snapshot."""
    without_s: tuple[float, ...]
    """Steps of all runs without."""
    with_s: dict[int, tuple[float, ...]]
    """Of all runs with: by how many steps came since the last snapshot."""
    late_share: float

    @property
    def usual_s(self) -> float:
        return statistics.median(self.without_s)

    @property
    def mirrored_s(self) -> float:
        return statistics.fmean(statistics.median(times) for times in self.with_s.values())

    @property
    def cost(self) -> float:
        return self.mirrored_s / self.usual_s - 1


def prepared_for(steps: int, *, snapshots: bool) -> Prepared:
    training = TrainingConfig(steps=steps, batch_size=16, micro_batches=4)
    runtime = RuntimeConfig(snapshots=snapshots, adapt=False)
    return prepare(Job(name="snapshots", model=MODEL, data=DATA, training=training, runtime=runtime))


def planned(prepared: Prepared) -> tuple[Plan, Fleet]:
    def fleet(speed: float) -> Fleet:
        devices = tuple(
            Device(name=name, region="here", flops_per_s=speed, memory_bytes=1 << 34) for name in ("a", "b")
        )
        return Fleet(name="pair", devices=devices, links=Links(default=LINK))

    total = prepared.problem(fleet(1.0)).cumulative_flops
    middle = min(cuts(prepared.flow), key=lambda c: abs(total[c.position] - total[-1] / 2)).position
    found = fleet(total[-1] / 2 / STAGE_S)
    return build_plan(prepared.problem(found), found.names, [middle], planner="equal FLOPs"), found


class Steps(NamedTuple):
    """Of one run: seconds by step, the steps after which a snapshot was made, and the largest share of the time by
    which a device overran."""

    seconds: dict[int, float]
    kept: list[int]
    late_share: float

    def by_phase(self, every: int) -> dict[int, list[float]]:
        """Seconds by how many steps came since the last snapshot."""
        found: dict[int, list[float]] = {}
        for step, seconds in self.seconds.items():
            since = [step - k for k in self.kept if k <= step]
            if since and min(since) < every:
                found.setdefault(min(since), []).append(seconds)
        return found


def one_run(prepared: Prepared, plan: Plan, fleet: Fleet) -> Steps:
    """The first two steps and the last one do not count."""
    kept: list[int] = []

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "keep":
            kept.append(item.step)

    options = RunOptions(replan=lambda fleet: plan)  # a run that could recover: only then snapshots are of use
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepared, plan, fleet, Path(folder), options, Watcher(advanced=advanced))
    check_outcome(outcome)
    print(f"  snapshots after steps {kept}", file=sys.stderr)
    times = step_times(Trace(source="runtime", run="snapshots", spans=outcome.spans))
    counted = {step: seconds for step, seconds in sorted(times.items()) if 1 < step < prepared.job.training.steps - 1}
    return Steps(counted, kept, max(outcome.late_s.values()) / outcome.elapsed_s)


def main() -> int:
    parser = options_of(__doc__, LATEST, "fewer steps, one run of each kind")
    options = parser.parse_args()
    steps, turns = (13, 1) if options.quick else (19, 3)
    kinds = {snapshots: prepared_for(steps, snapshots=snapshots) for snapshots in (False, True)}
    plan, fleet = planned(kinds[True])
    deployment = StageAssignments(kinds[True], plan, fleet, emulated=fleet)
    every = deployment.layout.keep_every
    without: list[float] = []
    snapshot_sources: dict[int, tuple[float, ...]] = {}
    late = 0.0
    for turn in range(turns):
        for snapshots in (False, True) if turn % 2 == 0 else (True, False):
            ran = one_run(kinds[snapshots], plan, fleet)
            late = max(late, ran.late_share)
            median_s = statistics.median(ran.seconds.values())
            print(f"snapshots {'on' if snapshots else 'off'}: median {median_s:.4f} s", file=sys.stderr)
            if not snapshots:
                without += ran.seconds.values()
            for phase, times in ran.by_phase(every).items() if snapshots else ():
                snapshot_sources[phase] = (*snapshot_sources.get(phase, ()), *times)
    report = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        steps=steps,
        state_bytes=sum(deployment.state_bytes(name) for name in plan.devices),
        every=every,
        without_s=tuple(without),
        with_s=dict(sorted(snapshot_sources.items())),
        late_share=late,
    )
    write_figures(options.json, report)
    state, per_step = report.state_bytes / 1e6, report.state_bytes / report.every / 1e6
    table = Table("state", "snapshot every", "sent per step", "step without", "with", "cost", "late", title="Snapshots")
    table.add_row(
        f"{state:.1f} MB",
        f"{report.every} steps",
        f"{per_step:.1f} MB",
        f"{report.usual_s * 1e3:.0f} ms",
        f"{report.mirrored_s * 1e3:.0f} ms",
        f"{report.cost:+.1%}",
        f"{late:.1%}",
    )
    Console(width=120).print(table)
    return 0 if report.cost <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
