"""Step time of steps that overlap, beside their bound and beside the simulator, on the cases of pipeline_vs_torch.

    python benchmarks/delayed/run.py [--quick] [--slower 4] [--schedules delayed] [--networks wan]
        [--stages 2] [--counts 8] [--json PATH]

Processes over an emulated fleet. A message takes its link, and a micro-batch the slowest stage, as long as they do in
pipeline_vs_torch. Bounds and simulations use no measured time. `--slower` stretches all of these alike, so that what
else the machine does weighs less.

bound         max(stage compute, wire) x micro-batches
two versions  not less than that, and not less than half of a step alone in the pipeline: step t + 2 computes at what
              the update of step t leaves, so two steps take no less than one step takes from its first forward to its
              last backward
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import OptimizerConfig, RunOptions, Watcher, check_outcome, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import Trace, steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

FIGURES = Path(__file__).parent / "results" / "latest.json"
STEPS, SIZE, LENGTH, WIDTH, LAYERS = 11, 16, 32, 32, 4
MESSAGE_BYTES = SIZE * LENGTH * WIDTH * 4
"""64 KiB: a header of 300 bytes is half a percent of it."""
COMPUTE_S = {2: 0.0225, 4: 0.0140}
"""By stages: what a micro-batch takes the slowest one in pipeline_vs_torch, on two cores with nothing else on them."""
LINKS = {"loopback": (1e-4, 0.0005), "wan": (0.050, 0.0419)}
"""Latency, and what a message takes there besides."""


class Case(NamedTuple):
    network: str
    stages: int
    micro_batches: int
    slower: float = 1.0
    """Factor on all durations."""

    @property
    def compute_s(self) -> float:
        """Of a micro-batch on the slowest stage."""
        return COMPUTE_S[self.stages] * self.slower

    @property
    def wire_s(self) -> float:
        """Of a message."""
        return LINKS[self.network][1] * self.slower


CASES = [Case(network, stages, n) for network in LINKS for stages in COMPUTE_S for n in (8, 32)]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    schedule: str
    network: str
    stages: int
    micro_batches: int
    slower: float
    bound_s: float
    predicted_s: float
    """In the closed form, which for `delayed` is the bound of two versions."""
    simulated_s: float
    measured_s: float


class Report(msgspec.Struct, kw_only=True):
    machine: str
    rows: list[Row]


def _key(row: Row) -> tuple[str, str, int, int]:
    """A case that is measured again replaces its row."""
    return row.schedule, row.network, row.stages, row.micro_batches


def fleet_of(case: Case, flops_per_s: float) -> Fleet:
    devices = tuple(
        Device(name=f"d{k}", region="here", flops_per_s=flops_per_s, memory_bytes=1 << 34) for k in range(case.stages)
    )
    return Fleet(name="equal", devices=devices, links=Links(default=_link(case)))


def _link(case: Case) -> Link:
    return Link(LINKS[case.network][0] * case.slower, MESSAGE_BYTES / case.wire_s)


def prepared_of(case: Case, schedule: str) -> Prepared:
    options: dict[str, object] = {
        "vocab_size": 256,
        "sequence_length": LENGTH,
        "width": WIDTH,
        "layers": LAYERS,
        "heads": 2,
    }
    data: dict[str, object] = {"files": "stdlib", "sequence_length": LENGTH, "max_bytes": 1_000_000}
    job = Job(
        name="delayed",
        model=ModelSpec(name="gpt", options=options),
        data=DataSpec(kind="text", options=data),
        schedule=schedule,
        training=TrainingConfig(
            steps=STEPS, batch_size=SIZE * case.micro_batches, micro_batches=case.micro_batches, clip_norm=1.0
        ),
        optimizer=(OptimizerConfig(),),
        runtime=RuntimeConfig(threads=1, emulate=True, adapt=False, snapshots=False),
    )
    return prepare(job)


def blocks_of(flow: Flow, stages: int) -> list[int]:
    """Equal numbers of blocks."""
    clean = {cut.position for cut in cuts(flow) if len(cut.values) == 1 and not cut.shared}
    names = [f"blocks.{stage * LAYERS // stages}." for stage in range(1, stages)]
    found = [next(i for i, op in enumerate(flow.operators) if f"{op.module}.".startswith(name)) for name in names]
    assert set(found) <= clean, "one tensor crosses before each"
    return found


def planned(prepared: Prepared, case: Case) -> tuple[Plan, Fleet]:
    """On devices whose slowest stage takes the case's compute."""

    def plan_on(fleet: Fleet) -> Plan:
        return build_plan(prepared.problem(fleet), fleet.names, blocks_of(prepared.flow, case.stages), planner="blocks")

    most = max(stage.flops_forward + stage.flops_backward for stage in plan_on(fleet_of(case, 1e9)).stages)
    fleet = fleet_of(case, most / case.compute_s)
    return plan_on(fleet), fleet


def row_of(case: Case, schedule: str) -> Row:
    prepared = prepared_of(case, schedule)
    plan, fleet = planned(prepared, case)
    spec = RunSpec(steps=STEPS, micro_batches=case.micro_batches, micro_batch_size=SIZE)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepared, plan, fleet, Path(folder), RunOptions(emulate=True), Watcher())
    check_outcome(outcome)
    measured = Trace(source="runtime", run="delayed", spans=tuple(outcome.spans), period=plan.period)
    return Row(
        schedule=schedule,
        network=case.network,
        stages=case.stages,
        micro_batches=case.micro_batches,
        slower=case.slower,
        bound_s=case.micro_batches * max(case.compute_s, case.wire_s),
        predicted_s=plan.predicted.step_s,
        simulated_s=steady_step_s(simulate(plan, fleet, spec, SimulationOptions(clips=True))),
        measured_s=steady_step_s(measured),
    )


def table(rows: Sequence[Row]) -> str:
    head = f"{'schedule':9}{'network':>9}{'stages':>7}{'n':>4}{'bound':>8}{'closed':>8}{'simulated':>10}{'measured':>9}"
    lines = [f"{head}{'/ bound':>8}{'/ closed':>9}{'/ simulated':>12}"]
    for r in rows:
        lines.append(
            f"{r.schedule:9}{r.network:>9}{r.stages:7}{r.micro_batches:4}{r.bound_s:8.3f}{r.predicted_s:8.3f}"
            f"{r.simulated_s:10.3f}{r.measured_s:9.3f}{r.measured_s / r.bound_s:8.3f}"
            f"{r.measured_s / r.predicted_s:9.3f}{r.measured_s / r.simulated_s:12.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = options_of(__doc__, FIGURES, quick="cases of 8 micro-batches alone")
    parser.add_argument("--slower", type=float, default=1.0, help="factor on all durations")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "delayed"], choices=["1f1b", "delayed"])
    parser.add_argument("--networks", nargs="+", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 32], help="numbers of micro-batches")
    given = parser.parse_args()
    chosen = [c for c in CASES if c.network in given.networks and c.stages in given.stages]
    cases = [c._replace(slower=given.slower) for c in chosen if c.micro_batches in given.counts]
    kept = msgspec.json.decode(given.json.read_bytes(), type=Report).rows if given.json.exists() else []
    rows = {_key(row): row for row in kept}
    for case in cases:
        for schedule in given.schedules if case.micro_batches == 8 or not given.quick else ():
            row = row_of(case, schedule)
            rows[_key(row)] = row
            print(table([row]), flush=True)
            write_figures(given.json, Report(machine=machine(), rows=list(rows.values())))
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
