"""Weight gradients apart (`zero-bubble`) against 1F1B at equal memory, on eight fleets with latency.

`python benchmarks/split_backward/run.py [--quick] [--measure] [--slower FACTOR] [--only PATTERN]`

Both schedules have the same stages and the same bytes of memory per device: what 1F1B's classic limits need (stage s
of S holds S - s micro-batches), or twice that, or all that they can use. Whatever a schedule keeps per micro-batch, it
holds as many as fit. Steps are those of the simulator; with `--measure` the fleets are run too, emulated, and with
`--slower` all times are so many times as long: two cores keep up with eight devices that are slow enough.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import Problem, build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, check_outcome, run_plan, run_spec
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import Trace, steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import chosen, machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
MICRO_BATCH_SIZE = 2
GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 64, "width": 64, "layers": 16, "heads": 4}
PLENTY = 1 << 40


class Case(NamedTuple):
    devices: int
    latency_s: float
    bandwidth: float
    """Bytes per second."""
    micro_batches: int
    memory: float
    """Times what 1F1B's classic limits need; 0: as much as is of use."""
    speeds: tuple[float, ...] = ()
    """Of the devices, relative; equal if empty."""
    device_s: float = 0.120
    """Compute of a stage per micro-batch."""

    @property
    def name(self) -> str:
        memory = f"{self.memory:g} x classic" if self.memory else "plenty"
        unequal = ", unequal" if self.speeds else ""
        return f"{self.devices} devices{unequal}, {self.latency_s * 1e3:g} ms, {self.micro_batches} mb, {memory}"

    def slower(self, factor: float) -> Case:
        return self._replace(
            latency_s=factor * self.latency_s, bandwidth=self.bandwidth / factor, device_s=factor * self.device_s
        )


CASES = (
    Case(4, 0.005, 12.5e6, 8, 1),
    Case(4, 0.050, 12.5e6, 8, 1),
    Case(4, 0.050, 12.5e6, 8, 2),
    Case(4, 0.050, 12.5e6, 8, 1, (1.0, 0.7, 1.0, 0.7)),
    Case(8, 0.020, 12.5e6, 8, 1),
    Case(8, 0.050, 25e6, 16, 1),
    Case(8, 0.050, 25e6, 16, 2),
    Case(8, 0.050, 25e6, 32, 0),
)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    schedule: str
    in_flight: tuple[int, ...]
    memory_bytes: int
    """Of the device that needs the most."""
    predicted_s: float
    simulated_s: float
    measured_s: float | None = None
    late_share: float | None = None
    """Of the run, by how much emulated tasklets overran: the host's fault."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    whole: Result
    apart: Result

    @property
    def change(self) -> float:
        return self.apart.simulated_s / self.whole.simulated_s - 1

    @property
    def measured(self) -> float | None:
        a, b = self.apart.measured_s, self.whole.measured_s
        return None if a is None or b is None else a / b - 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    rows: tuple[Row, ...]


def job(case: Case, steps: int) -> Job:
    data = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": 100_000})
    batch = case.micro_batches * MICRO_BATCH_SIZE
    training = TrainingConfig(steps=steps, batch_size=batch, micro_batches=case.micro_batches)
    return Job(name="split-backward", model=ModelSpec(name="gpt", options=GPT), data=data, training=training)


def fleet_of(case: Case, flops: int, memories: tuple[int, ...]) -> Fleet:
    speeds = case.speeds or (1.0,) * case.devices
    devices = tuple(
        Device(
            name=f"d{k}",
            region="here",
            flops_per_s=speed * flops / case.devices / case.device_s,
            memory_bytes=memories[k],
        )
        for k, speed in enumerate(speeds)
    )
    return Fleet(name="equal", devices=devices, links=Links(default=Link(case.latency_s, case.bandwidth)))


def plan_of(problem: Problem) -> Plan:
    """Shares of the FLOPs by speed, at cuts that one tensor of the residual stream crosses."""
    legal = [cut.position for cut in cuts(problem.flow) if len(cut.values) == 1]
    speeds = [device.flops_per_s for device in problem.fleet.devices]
    shares = [sum(speeds[:k]) / sum(speeds) for k in range(1, len(speeds))]
    done = problem.cumulative_flops
    boundaries = [min(legal, key=lambda p: abs(done[p] - done[-1] * share)) for share in shares]
    return build_plan(problem, problem.fleet.names, boundaries, planner="by hand")


def memories_of(case: Case, prepared: Prepared, flops: int) -> tuple[int, ...]:
    """Bytes per device."""
    if not case.memory:
        return (PLENTY,) * case.devices
    plan = plan_of(problem_of(prepared, fleet_of(case, flops, (PLENTY,) * case.devices), "1f1b"))
    found: list[int] = []
    for stage, (memory, held) in enumerate(
        zip((s.memory for s in plan.stages), plan.replica.schedule.in_flight, strict=True)
    ):
        classic = min(case.micro_batches, case.devices - stage)
        found.append(memory.total - memory.activations + int(case.memory * classic) * (memory.activations // held))
    return tuple(found)


def problem_of(prepared: Prepared, fleet: Fleet, schedule: str) -> Problem:
    problem = replace(prepared.problem(fleet), schedule=schedule, recompute=False)
    return replace(problem, constraints=msgspec.structs.replace(problem.constraints, memory_headroom=0.0))


def measured(prepared: Prepared, plan: Plan, fleet: Fleet) -> tuple[float, float]:
    """(seconds per step, share of the time by which tasklets overran)."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepared, plan, fleet, Path(folder), RunOptions(), Watcher())
    check_outcome(outcome)
    late = max(outcome.late_s.values()) / max(span.end_s for span in outcome.spans)
    return steady_step_s(Trace(source="runtime", run="split-backward", spans=outcome.spans)), late


def row(case: Case, steps: int, *, run: bool) -> Row:
    prepared = prepare(job(case, steps))
    flops = prepared.problem(fleet_of(case, 1, (PLENTY,) * case.devices)).cumulative_flops[-1]
    fleet = fleet_of(case, flops, memories_of(case, prepared, flops))
    results: list[Result] = []
    for schedule in ("1f1b", "zero-bubble"):
        plan = plan_of(problem_of(prepared, fleet, schedule))
        step_s, late = measured(prepared, plan, fleet) if run else (None, None)
        results.append(
            Result(
                schedule=schedule,
                in_flight=plan.replica.schedule.in_flight,
                memory_bytes=max(s.memory.total for s in plan.stages),
                predicted_s=plan.predicted.step_s,
                simulated_s=steady_step_s(simulate(plan, fleet, run_spec(prepared))),
                measured_s=step_s,
                late_share=late,
            )
        )
    return Row(case=case.name, whole=results[0], apart=results[1])


def table(found: Report) -> Table:
    drawn = Table("fleet", "in flight 1F1B", "apart", title="Step with weight gradients apart, against 1F1B")
    for heading in ("1F1B", "apart", "simulated", "closed form", "measured", "late"):
        drawn.add_column(heading, justify="right")
    for r in found.rows:
        late = max(r.whole.late_share or 0.0, r.apart.late_share or 0.0)
        drawn.add_row(
            r.case,
            " ".join(map(str, r.whole.in_flight)),
            " ".join(map(str, r.apart.in_flight)),
            f"{r.whole.simulated_s * 1e3:.0f} ms",
            f"{r.apart.simulated_s * 1e3:.0f} ms",
            f"{r.change:+.1%}",
            f"{r.apart.predicted_s / r.whole.predicted_s - 1:+.1%}",
            "" if r.measured is None else f"{r.measured:+.1%}",
            "" if r.measured is None else f"{late:.1%}",
        )
    return drawn


def main() -> None:
    parser = options_of(__doc__, LATEST, "two fleets, fewer steps")
    parser.add_argument("--measure", action="store_true", help="also run them")
    parser.add_argument("--slower", type=float, default=1.0, metavar="FACTOR", help="all times so many times as long")
    parser.add_argument("--only", default="", help="fleets whose name has a match of this pattern")
    options = parser.parse_args()
    steps = 3 if options.quick else 6
    rows: list[Row] = []
    cases = CASES[:2] if options.quick else CASES
    for case in chosen(parser, "--only", options.only, cases, key=lambda case: case.name):
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        rows.append(row(case.slower(options.slower), steps, run=options.measure))
    found = Report(when=datetime.now(UTC).isoformat(timespec="seconds"), host=machine(), rows=tuple(rows))
    Console(width=150).print(table(found))
    write_figures(options.json, found)


if __name__ == "__main__":
    main()
