"""How long a step of a chain takes on the virtual clock, under the yardstick's meter and over TCP.

meter   a machine has one wire for both neighbours, and a message occupies it for the latency more than its bytes
        take. (Here the wire is that of what leaves: along a chain as much leaves as arrives.)
tcp     as TCP between two machines is: each direction and each neighbour for itself, latency on the way

1f1b      as many micro-batches in flight as torch.distributed.pipelining has
deep      as many as hide a round trip
delayed   the same, without a pause between steps
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from isthmus.cost import EdgeTime, PipelineTime
from isthmus.fleet import Device, Fleet, Link, Links, Region
from isthmus.plans import Plan, Schedule, classic_in_flight
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import steady_step_s

Network = Literal["meter", "tcp"]
NETWORKS: tuple[Network, ...] = ("meter", "tcp")
Order = Literal["1f1b", "deep", "delayed"]
STEPS = 10


class Step(msgspec.Struct, frozen=True):
    seconds: float
    micro_batches: int
    in_flight: int
    """On the first stage."""


def step_of(plan: Plan, link: Link, flops_per_s: float, network: Network, order: Order, *, clips: bool = False) -> Step:
    """Of a plan whose stages send to their neighbours only, on equal devices with equal links. Simulated."""
    fleet, count = fleet_of(plan, link, flops_per_s, network), plan.micro_batches
    if network == "meter":
        plan = _with_latency_as_bytes(plan, round(link.latency_s * link.bandwidth_bytes_per_s))
        link = Link(0.0, link.bandwidth_bytes_per_s)
    plan = scheduled(plan, link, flops_per_s, network, order)
    spec = RunSpec(steps=STEPS, micro_batches=count, micro_batch_size=plan.micro_batch_size)
    trace = simulate(plan, fleet, spec, SimulationOptions(clips=clips))
    return Step(steady_step_s(trace), count, plan.replica.schedule.in_flight[0])


def scheduled(plan: Plan, link: Link, flops_per_s: float, network: Network, order: Order) -> Plan:
    """The plan with the order's micro-batches in flight."""
    count = plan.micro_batches
    times = _times(plan, link, flops_per_s, network, order)
    in_flight = classic_in_flight("1f1b", len(times.devices), count)
    if order != "1f1b":
        period_s, most = times.bottleneck[0], times.steps * count
        hiding = [math.ceil(trip_s / period_s) + times.steps for trip_s in times.round_trips_s[:-1]]
        in_flight = (*(min(max(pair), most) for pair in zip(in_flight, hiding, strict=False)), 1)
    schedule = Schedule("delayed" if order == "delayed" else "1f1b", in_flight)
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(plan.replica, schedule=schedule),))


def bound_s(plan: Plan, link: Link, flops_per_s: float) -> float:
    """Over TCP: the longest of any stage's compute and any link's direction."""
    return plan.micro_batches * _times(plan, link, flops_per_s, "tcp", "deep").bottleneck[0]


def fleet_of(plan: Plan, link: Link, flops_per_s: float, network: Network) -> Fleet:
    names = [stage.device for stage in plan.stages]
    devices = tuple(Device(name=n, region=f"at-{n}", flops_per_s=flops_per_s, memory_bytes=1 << 40) for n in names)
    if network == "tcp":
        return Fleet(name=plan.fleet, devices=devices, links=Links(default=link))
    wires = tuple(Region(region=f"at-{n}", uplink_bytes_per_s=link.bandwidth_bytes_per_s) for n in names)
    wire = Link(0.0, link.bandwidth_bytes_per_s)
    return Fleet(name=plan.fleet, devices=devices, links=Links(default=wire), region_info=wires)


def _with_latency_as_bytes(plan: Plan, more: int) -> Plan:
    edges = tuple(
        msgspec.structs.replace(
            edge,
            forward_bytes=edge.forward_wire_bytes + more,
            backward_bytes=edge.backward_wire_bytes + more,
            forward_compression=None,
            backward_compression=None,
        )
        for edge in plan.replica.edges
    )
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(plan.replica, edges=edges),))


def _times(plan: Plan, link: Link, flops_per_s: float, network: Network, order: Order) -> PipelineTime:
    leaves_s = [0.0] * len(plan.stages)
    edges: list[EdgeTime] = []
    for edge in plan.replica.edges:
        assert edge.target == edge.source + 1, "messages go to the next stage only"
        there_s = edge.forward_wire_bytes / link.bandwidth_bytes_per_s
        back_s = edge.backward_wire_bytes / link.bandwidth_bytes_per_s
        hops_s = link.latency_s + there_s, link.latency_s + back_s
        edges.append(EdgeTime(edge.source, edge.target, *hops_s, there_s, back_s))
        leaves_s[edge.source] += there_s
        leaves_s[edge.target] += back_s
    names = tuple(stage.device for stage in plan.stages)
    return PipelineTime(
        devices=names,
        forward_s=tuple(s.flops_forward / flops_per_s for s in plan.stages),
        backward_s=tuple(s.flops_backward / flops_per_s for s in plan.stages),
        edges=tuple(edges),
        shared_s=0.0,
        uplinks_s=tuple(zip(names, leaves_s, strict=True)) if network == "meter" else (),
        steps=2 if order == "delayed" else 1,
    )
