"""What changes in mid-run, and on which fleets."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from isthmus.data import DataSpec
from isthmus.fleet import Device, Fleet, FleetChange, Link, Links, Route, resolve_fleet
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan

Kind = Literal["link", "device"]
LINK_FACTOR, DEVICE_FACTOR = 0.1, 0.25
STAGE_S = 0.13
"""A third of the model on one of the emulated devices, per micro-batch: slow enough for a host of two cores."""
MBIT = 1e6 / 8

MODEL = ModelSpec(name="gpt", options={"vocab_size": 256, "sequence_length": 64, "width": 32, "layers": 12, "heads": 2})
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": 200_000})


class Case(NamedTuple):
    name: str
    kind: Kind
    fleet: Fleet


def job(steps: int) -> Job:
    training = TrainingConfig(steps=steps, batch_size=16, micro_batches=4)
    return Job(
        name="adaptation",
        model=MODEL,
        data=DATA,
        training=training,
        runtime=RuntimeConfig(timeout="60 s", snapshots=False),
    )


def prepared_for(steps: int) -> Prepared:
    return prepare(job(steps))


def triangle(prepared: Prepared) -> Fleet:
    """Three equal devices; the link between two of them is twice as fast as the other two links."""
    probe = Fleet(name="one", devices=(_device("a", 1.0),), links=Links())
    speed = prepared.problem(probe).cumulative_flops[-1] / 3 / STAGE_S
    fast = [Route(x, y, Link(0.005, 10 * MBIT)) for x, y in (("a", "b"), ("b", "a"))]
    return Fleet(
        name="triangle",
        devices=tuple(_device(name, speed) for name in "abc"),
        links=Links(default=Link(0.005, 5 * MBIT), devices=tuple(fast)),
    )


def thinned_fleet(name: str, devices: int, prepared: Prepared) -> Fleet:
    """A built-in fleet with devices of STAGE_S on the mean."""
    fleet = resolve_fleet(name).thin(devices)
    mean = sum(d.flops_per_s for d in fleet.devices) / devices
    speed = prepared.problem(fleet).cumulative_flops[-1] / 3 / STAGE_S
    scaled = (msgspec.structs.replace(d, flops_per_s=d.flops_per_s / mean * speed) for d in fleet.devices)
    return msgspec.structs.replace(fleet, devices=tuple(scaled))


def _device(name: str, flops_per_s: float) -> Device:
    return Device(name=name, region="here", flops_per_s=flops_per_s, memory_bytes=1 << 32)


def crossed(plan: Plan) -> list[tuple[str, str]]:
    """The links that the plan uses."""
    found: dict[tuple[str, str], None] = {}
    for replica in plan.replicas:
        for edge in replica.edges:
            found[replica.stages[edge.source].device, replica.stages[edge.target].device] = None
    for group in plan.sync.groups:
        found |= {(a, b): None for a in group.devices for b in group.devices if a < b}
    return list(found)


def changes(kind: Kind, plan: Plan, fleet: Fleet, step: int) -> tuple[FleetChange, ...]:
    """The fastest link that the plan crosses drops, both ways; or its fastest device slows down."""
    if kind == "device":
        name = max(plan.used, key=lambda d: fleet.device(d).flops_per_s)
        return (FleetChange(step=step, factor=DEVICE_FACTOR, device=name),)
    a, b = max(crossed(plan), key=lambda pair: fleet.link(*pair).bandwidth_bytes_per_s)
    return tuple(FleetChange(step=step, factor=LINK_FACTOR, link=pair) for pair in ((a, b), (b, a)))
