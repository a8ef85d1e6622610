"""Interleaved stages on equal devices: when do they pay? Hand-written plans on the virtual clock.

`python benchmarks/interleaved/run.py [--quick]`

A device has `v` stages of the chain instead of one: p devices, p * v stages of equal FLOPs, stage k on device k mod p.
Each link has the same figures. A device computes 120 ms per micro-batch in every plan.
"""

from __future__ import annotations

import argparse
import itertools

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunSpec
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s

DEVICE_S = 0.120
LINKS = {
    "10 Gbit/s, 0.1 ms": Link(1e-4, 1.25e9),
    "100 Mbit/s, 5 ms": Link(5e-3, 1.25e7),
    "20 Mbit/s, 20 ms": Link(2e-2, 2.5e6),
}
STAGES_EACH = (1, 2, 4)
MICRO_BATCH_SIZE = 4
GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 64, "width": 64, "layers": 32, "heads": 4}


def job() -> Job:
    data = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": 100_000})
    training = TrainingConfig(steps=3, batch_size=MICRO_BATCH_SIZE, micro_batches=1)
    return Job(name="interleaved", model=ModelSpec(name="gpt", options=GPT), data=data, training=training)


def with_micro_batches(prepared: Prepared, count: int) -> Prepared:
    training = msgspec.structs.replace(prepared.job.training, batch_size=count * MICRO_BATCH_SIZE, micro_batches=count)
    return msgspec.structs.replace(prepared, job=msgspec.structs.replace(prepared.job, training=training))


def fleet_of(devices: int, link: Link, flops: int) -> Fleet:
    """Equal devices. A device computes its share of `flops` in `DEVICE_S`."""
    each = tuple(
        Device(name=f"d{k}", region="here", flops_per_s=flops / devices / DEVICE_S, memory_bytes=1 << 40)
        for k in range(devices)
    )
    return Fleet(name="equal", devices=each, links=Links(default=link))


def interleaved(prepared: Prepared, fleet: Fleet, stages_each: int) -> Plan:
    problem, stages = prepared.problem(fleet), len(fleet.names) * stages_each
    legal, done = [cut.position for cut in cuts(prepared.flow)], problem.cumulative_flops
    boundaries = [min(legal, key=lambda p: abs(done[p] - done[-1] * k / stages)) for k in range(1, stages)]
    return build_plan(problem, fleet.names * stages_each, boundaries, planner="by hand")


def activations(plan: Plan) -> int:
    """Bytes on the device that holds the most."""
    held = dict.fromkeys(plan.devices, 0)
    for stage in plan.stages:
        held[stage.device] += stage.memory.activations
    return max(held.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four devices alone")
    devices = (4,) if parser.parse_args().quick else (2, 4, 8)
    prepared = prepare(job())
    flops = prepared.problem(fleet_of(1, LINKS["10 Gbit/s, 0.1 ms"], 1)).cumulative_flops[-1]
    table = Table("link", "devices", "micro-batches", title="Step, and activations held, against one stage per device")
    for v in STAGES_EACH:
        table.add_column(f"{v} each", justify="right")
    for name, p, per_device in itertools.product(LINKS, devices, (1, 2, 4)):
        ready = with_micro_batches(prepared, p * per_device)
        fleet = fleet_of(p, LINKS[name], flops)
        plans = [interleaved(ready, fleet, v) for v in STAGES_EACH]
        spec = RunSpec(steps=3, micro_batches=p * per_device, micro_batch_size=MICRO_BATCH_SIZE)
        steps = [steady_step_s(simulate(plan, fleet, spec)) for plan in plans]
        shown = [f"{steps[0] * 1e3:.0f} ms"] + [
            f"{step / steps[0] - 1:+.0%}, x {activations(plan) / activations(plans[0]):.1f}"
            for step, plan in zip(steps[1:], plans[1:], strict=True)
        ]
        table.add_row(name, str(p), str(p * per_device), *shown)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
