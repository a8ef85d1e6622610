"""A six-stage GPT over 80 Mbit/s beside itself over links without a limit.

    python benchmarks/wan_loss/throughput.py               # on the virtual clock
    python benchmarks/wan_loss/throughput.py --measure --methods subspace residual    # a small twin, over processes

Protocol Models (arXiv 2506.01260) says that 100 times fewer bytes let 80 Mbit/s keep up with a data centre. Twelve
layers of width 1,024, two a stage, 64 micro-batches of 4 x 512 tokens, devices of 5 TFLOP/s, 20 ms.

The twin has layers of width 128, one a stage, 32 micro-batches of 4 x 64 tokens, so that headers are a small part of
messages. Its devices take 200 ms for a micro-batch, or `--compute` seconds; latency and the bytes that a link carries
stand to that as they do in the original. So it is slower, and the dense model's ratios are the same. Devices that are
slower than this host share its cores without loss.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
from step_times import places_of

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import OptimizerConfig, RunOptions, RunSpec, Watcher, check_outcome, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import BoundaryOptions, ModelSpec
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import Trace, steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

FIGURES = Path(__file__).parent / "results" / "throughput.json"
STAGES, SPEED, LINK = 6, 5e12, Link(0.02, 80e6 / 8)
STEPS = 9


class Size(NamedTuple):
    width: int
    layers: int
    heads: int
    length: int
    micro_batches: int
    samples: int
    """Of a micro-batch."""

    @property
    def message_bytes(self) -> int:
        """Of the dense model, one way."""
        return 4 * self.width * self.length * self.samples

    @property
    def ends(self) -> range:
        """The last block of each stage but the last."""
        each = self.layers // STAGES
        return range(each - 1, self.layers - 1, each)

    def job(self, method: str, schedule: str) -> Job:
        options: dict[str, object] = {
            "sequence_length": self.length,
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
        }
        data = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": self.length, "max_bytes": 200_000})
        n = self.micro_batches
        after = tuple(f"blocks.{block}" for block in self.ends)
        boundary = None
        if method == "subspace":
            boundary = BoundaryOptions(method="subspace", rate=100)
        elif method == "residual":
            boundary = BoundaryOptions(method="residual", rate=100, after=after)
        return Job(
            name="throughput",
            model=ModelSpec(name="gpt", options=options, boundary=boundary),
            data=data,
            schedule=schedule,
            training=TrainingConfig(steps=STEPS, batch_size=n * self.samples, micro_batches=n),
            optimizer=(OptimizerConfig(),),
            runtime=RuntimeConfig(threads=1, emulate=True, adapt=False, snapshots=False),
        )


ORIGINAL, TWIN = Size(1024, 12, 16, 512, 64, 4), Size(128, 6, 4, 64, 32, 4)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step over the narrow links, and over links without a limit."""

    method: str
    schedule: str
    narrow_s: float
    unlimited_s: float
    measured_narrow_s: float | None = None
    measured_unlimited_s: float | None = None


def fleet(link: Link, speed: float) -> Fleet:
    devices = tuple(Device(name=f"d{k}", region="far", flops_per_s=speed, memory_bytes=80 << 30) for k in range(STAGES))
    return Fleet(name="six", devices=devices, links=Links(default=link))


def planned(prepared: Prepared, size: Size, machines: Fleet) -> Plan:
    places = places_of(prepared.flow, size.ends)
    return build_plan(prepared.problem(machines), machines.names, places, planner="equal blocks")


def simulated_s(prepared: Prepared, size: Size, link: Link, speed: float) -> float:
    machines, job = fleet(link, speed), prepared.job
    spec = RunSpec(steps=STEPS, micro_batches=job.micro_batches, micro_batch_size=job.micro_batch_size)
    return steady_step_s(simulate(planned(prepared, size, machines), machines, spec))


def measured_s(prepared: Prepared, plan: Plan, machines: Fleet) -> float:
    """Of a step, over processes and emulated links."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepared, plan, machines, Path(folder), RunOptions(emulate=True), Watcher())
    check_outcome(outcome)
    return steady_step_s(Trace(source="runtime", run="throughput", spans=tuple(outcome.spans), period=plan.period))


def slowest_flops(prepared: Prepared, size: Size) -> int:
    stages = planned(prepared, size, fleet(LINK, SPEED)).stages
    return max(stage.flops_forward + stage.flops_backward for stage in stages)


def twin_of(dense: Prepared, compute_s: float) -> tuple[float, Link]:
    """The twin's speed and narrow link: latency, and the time that a dense message takes, as multiples of the dense
    model's compute, are the original's. `compute_s`: of a dense micro-batch on the slowest stage, both ways."""
    original_s = slowest_flops(prepare(ORIGINAL.job("dense", "1f1b")), ORIGINAL) / SPEED
    slower = compute_s / original_s
    message_s = ORIGINAL.message_bytes / LINK.bandwidth_bytes_per_s * slower
    return slowest_flops(dense, TWIN) / compute_s, Link(LINK.latency_s * slower, TWIN.message_bytes / message_s)


def row_of(size: Size, method: str, schedule: str, speed: float, link: Link, *, measure: bool) -> Row:
    prepared, unlimited = prepare(size.job(method, schedule)), Link(1e-5, 1e12)
    row = Row(
        method=method,
        schedule=schedule,
        narrow_s=simulated_s(prepared, size, link, speed),
        unlimited_s=simulated_s(prepared, size, unlimited, speed),
    )
    if not measure:
        return row
    narrow_s, unlimited_s = (
        measured_s(prepared, planned(prepared, size, machines), machines)
        for machines in (fleet(link, speed), fleet(unlimited, speed))
    )
    return msgspec.structs.replace(row, measured_narrow_s=narrow_s, measured_unlimited_s=unlimited_s)


def line(row: Row) -> str:
    text = f"{row.method:9}{row.schedule:9}{row.narrow_s:10.3f}{row.unlimited_s:11.3f}"
    text += f"{row.unlimited_s / row.narrow_s:8.1%}"
    if row.measured_narrow_s is None or row.measured_unlimited_s is None:
        return text
    share = row.measured_unlimited_s / row.measured_narrow_s
    return f"{text}{row.measured_narrow_s:10.3f}{row.measured_unlimited_s:11.3f}{share:8.1%}"


def main() -> None:
    parser = options_of(__doc__, FIGURES)
    parser.add_argument("--measure", action="store_true", help="run the twin over processes")
    methods, schedules = ["dense", "subspace", "residual"], ["1f1b", "delayed"]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--schedules", nargs="+", choices=schedules, default=schedules)
    parser.add_argument("--compute", type=float, default=0.2, help="seconds of a micro-batch on the twin's devices")
    given = parser.parse_args()
    size, speed, link = ORIGINAL, SPEED, LINK
    if given.measure:
        size, (speed, link) = TWIN, twin_of(prepare(TWIN.job("dense", "1f1b")), given.compute)
    path: Path = given.json
    figures = msgspec.json.decode(path.read_bytes(), type=dict[str, Row]) if path.exists() else {}
    print("seconds per step: simulated over narrow links and unlimited, share kept; then the same measured")
    for method in given.methods:
        for schedule in given.schedules:
            row = row_of(size, method, schedule, speed, link, measure=given.measure)
            figures[f"{'twin' if given.measure else 'original'}, {method}, {schedule}"] = row
            print(line(row), flush=True)
            write_figures(path, figures)


if __name__ == "__main__":
    main()
