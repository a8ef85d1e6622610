"""Snapshots: what copies of the devices' state in each other's memory cost a run.

`python benchmarks/snapshots/run.py [--quick] [--json PATH]`

The same run with snapshots and without, in turns: two emulated devices joined by 100 Mbit/s, more than 50 MB of weights
and optimizer state. What counts is the mean time of a step, with everything that comes between steps: a snapshot is
taken once in several steps.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plan import Plan
from isthmus.protocol import Item
from isthmus.runtime.conducting.deployment import Deployment
from isthmus.runtime.conducting.run import RunOptions, Watcher, check_outcome, train
from isthmus.trace import Span, Trace, step_times

LATEST = Path(__file__).parent / "results" / "latest.json"
LIMIT = 0.03
STAGE_S = 0.3
"""Half of the model for one micro-batch on an emulated device: more than a core of this kind needs."""
LINK = Link(0.005, 100e6 / 8)
MODEL = ModelSpec(name="gpt", options={
    "vocab_size": 256, "sequence_length": 64, "width": 288, "layers": 5, "heads": 4
})  # fmt: skip
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
    """Mean step of each run without."""
    with_s: tuple[float, ...]
    late_share: float

    @property
    def cost(self) -> float:
        return statistics.median(self.with_s) / statistics.median(self.without_s) - 1


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


def mean_step_s(prepared: Prepared, plan: Plan, fleet: Fleet) -> tuple[float, float]:
    """Mean of all steps but the first two, and the largest share of the time by which a device overran."""
    kept: list[int] = []

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "keep":
            kept.append(item.step)

    options = RunOptions(replan=lambda fleet: plan)  # a run that could recover: only then snapshots are of use
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(prepared, plan, fleet, Path(folder), options, Watcher(advanced=advanced))
    check_outcome(outcome)
    print(f"  snapshots after steps {kept}", file=sys.stderr)
    times = step_times(Trace(source="runtime", run="snapshots", spans=outcome.spans))
    counted = [seconds for step, seconds in sorted(times.items()) if 1 < step < prepared.job.training.steps - 1]
    return statistics.fmean(counted), max(outcome.late_s.values()) / outcome.elapsed_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, one run of each kind")
    parser.add_argument("--json", type=Path, default=LATEST, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    steps, turns = (16, 1) if options.quick else (28, 2)
    kinds = {snapshots: prepared_for(steps, snapshots=snapshots) for snapshots in (False, True)}
    plan, fleet = planned(kinds[True])
    deployment = Deployment(kinds[True], plan, fleet, emulated=fleet)
    found: dict[bool, list[float]] = {False: [], True: []}
    late = 0.0
    for _ in range(turns):
        for snapshots, prepared in kinds.items():
            seconds, late_share = mean_step_s(prepared, plan, fleet)
            print(f"snapshots {'on' if snapshots else 'off'}: {seconds:.4f} s", file=sys.stderr)
            found[snapshots].append(seconds)
            late = max(late, late_share)
    report = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", steps=steps,
        state_bytes=sum(deployment.state_bytes(name) for name in plan.devices), every=deployment.layout.keep_every,
        without_s=tuple(found[False]), with_s=tuple(found[True]), late_share=late,
    )  # fmt: skip
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    state, per_step = report.state_bytes / 1e6, report.state_bytes / report.every / 1e6
    table = Table("state", "snapshot every", "sent per step", "step without", "with", "cost", "late", title="Snapshots")
    table.add_row(
        f"{state:.1f} MB", f"{report.every} steps", f"{per_step:.1f} MB",
        f"{statistics.median(report.without_s) * 1e3:.0f} ms", f"{statistics.median(report.with_s) * 1e3:.0f} ms",
        f"{report.cost:+.1%}", f"{late:.1%}",
    )  # fmt: skip
    Console(width=120).print(table)
    return 0 if report.cost <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
