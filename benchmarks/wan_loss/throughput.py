"""A six-stage GPT over 80 Mbit/s beside the dense model over links without a limit, on the virtual clock.

`python benchmarks/wan_loss/throughput.py`

Protocol Models (arXiv 2506.01260) says that 100 times fewer bytes let 80 Mbit/s keep up with a data centre. Twelve
layers of width 1,024, two a stage, 64 micro-batches of 4 x 512 tokens, 20 ms.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunSpec
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, TrainingConfig, prepare
from isthmus.models import BoundaryOptions, ModelSpec
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s

STAGES, MICRO_BATCHES, SIZE, LENGTH = 6, 64, 4, 512
SPEEDS = (5e12, 2e13)
"""FLOP/s of a device, in training."""
NARROW, WIDE = Link(0.02, 80e6 / 8), Link(1e-5, 1e12)
BLOCKS = [f"blocks.{k}" for k in range(1, 2 * STAGES - 1, 2)]
BOUNDARIES = {
    "dense": None,
    "subspace 100x": BoundaryOptions(method="subspace", rate=100),
    "residual 100x": BoundaryOptions(method="residual", rate=100, after=tuple(BLOCKS)),
}


def job(boundary: BoundaryOptions | None) -> Job:
    options: dict[str, object] = {"sequence_length": LENGTH, "width": 1024, "layers": 2 * STAGES, "heads": 16}
    data = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": LENGTH, "max_bytes": 200_000})
    training = TrainingConfig(steps=3, batch_size=MICRO_BATCHES * SIZE, micro_batches=MICRO_BATCHES)
    model = ModelSpec(name="gpt", options=options, boundary=boundary)
    return Job(name="throughput", model=model, data=data, training=training)


def fleet(link: Link, speed: float) -> Fleet:
    devices = tuple(Device(name=f"d{k}", region="far", flops_per_s=speed, memory_bytes=80 << 30) for k in range(STAGES))
    return Fleet(name="six", devices=devices, links=Links(default=link))


def step_s(prepared: Prepared, link: Link, speed: float) -> float:
    machines = fleet(link, speed)
    problem, flow = prepared.problem(machines), prepared.flow
    done = problem.cumulative_flops
    near, sizes = done[-1] / STAGES / 8, {c.position: c.forward_bytes(flow, 1) for c in cuts(flow)}
    places: list[int] = []
    for k in range(1, STAGES):
        around = [p for p in sizes if abs(done[p] - done[-1] * k / STAGES) < near]
        places.append(min(around, key=lambda p: sizes[p]))
    plan = build_plan(problem, machines.names, places, planner="equal FLOPs")
    spec = RunSpec(steps=3, micro_batches=MICRO_BATCHES, micro_batch_size=SIZE)
    return steady_step_s(simulate(plan, machines, spec))


def main() -> None:
    table = Table("", *(f"{speed / 1e12:.0f} TFLOP/s" for speed in SPEEDS), title="Six stages, 80 Mbit/s, 20 ms")
    prepared = {name: prepare(job(boundary)) for name, boundary in BOUNDARIES.items()}
    unlimited = {speed: step_s(prepared["dense"], WIDE, speed) for speed in SPEEDS}
    for name, model in prepared.items():
        found = {speed: step_s(model, NARROW, speed) for speed in SPEEDS}
        table.add_row(name, *(f"{s:.2f} s, {unlimited[speed] / s:.1%} of unlimited" for speed, s in found.items()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
