"""Random planning problems: unequal devices, links and memory, in proportion to the model that they are to hold.

A link is drawn by what a typical message takes on it against what the model computes, because otherwise one device, or
all of them, would nearly always win.
"""

from __future__ import annotations

import itertools
import math
import random

from isthmus.cost import Problem, parameter_state
from isthmus.fleet import Device, Fleet, Link, Links, Region, Route
from isthmus.graph import Flow
from models import KINDS, model

MEMORY = (None, None, 8.0, 3.0, 1.5)
"""Of all devices together, over what the model needs with one micro-batch; None does not bind."""


def small_case(seed: int) -> Problem:
    """At most 5 devices and 10 units: what brute force can do."""
    source = random.Random(f"small {seed}")
    return case_of(source, source.randint(2, 5), source.randint(2, 9), f"small-{seed}")


def large_case(seed: int) -> Problem:
    """2 to 64 devices, evenly in the logarithm."""
    source = random.Random(f"large {seed}")
    devices = round(2 * 32 ** source.random())
    return case_of(source, devices, source.choice((8, 16, 32, 64)), f"large-{seed}")


def case_of(source: random.Random, devices: int, operators: int, name: str) -> Problem:
    kind = source.choice(KINDS)
    flow = Flow(model(source, kind, operators))
    state = parameter_state(source.choice(("sgd", "adamw")))
    micro_batches = source.choice((1, 2, 4, 8, 8, 16, 32, 64))
    schedule = source.choice(("1f1b", "1f1b", "1f1b", "gpipe"))
    roomy = Fleet(
        name=name,
        links=Links(default=Link(0.0, 1.0)),
        devices=(Device(name="all", region="here", flops_per_s=1.0, memory_bytes=1 << 50),),
    )
    whole = Problem(
        flow=flow, fleet=roomy, micro_batch_size=2, micro_batches=micro_batches, schedule=schedule, state=state
    )
    fleet = _fleet(source, whole, devices, name)
    return Problem(
        flow=flow, fleet=fleet, micro_batch_size=2, micro_batches=micro_batches, schedule=schedule, state=state
    )


def _fleet(source: random.Random, whole: Problem, count: int, name: str) -> Fleet:
    """The devices compute the model's micro-batch in about a second; memory and links are drawn to match."""
    work = float(whole.cumulative_flops[-1])
    regions = [f"site-{k}" for k in range(source.randint(1, max(1, min(8, count // 2))))]
    spread = source.choice((0.0, 0.5, 1.2))
    kinds = [work * math.exp(source.gauss(0, spread)) for _ in range(source.choice((1, 2, 3, count)))]
    room, factor = _need_bytes(whole), source.choice(MEMORY)
    weights = [source.uniform(0.5, 1.5) for _ in range(count)]
    memory = [1 << 50 if factor is None else max(1, int(factor * room * w / sum(weights))) for w in weights]
    devices = tuple(
        Device(
            name=f"d{k}",
            region=regions[k] if k < len(regions) else source.choice(regions),
            flops_per_s=source.choice(kinds),
            memory_bytes=memory[k],
        )
        for k in range(count)
    )
    limited = [region for region in regions if source.random() < 0.5]
    sites = tuple(Region(region=region, uplink_bytes_per_s=10 ** source.uniform(2, 4)) for region in limited)
    links = _links(source, devices, regions)
    return Fleet(name=name, devices=devices, links=links, region_info=sites if source.random() < 0.2 else ())


def _links(source: random.Random, devices: tuple[Device, ...], regions: list[str]) -> Links:
    """Near and far links; in one fleet out of four every directed link differs."""
    near, far = 10 ** source.uniform(2.5, 5.5), 10 ** source.uniform(1.5, 4.5)
    latency_s = 10 ** source.uniform(-4, -0.5)

    def link(bandwidth: float, delay_s: float) -> Link:
        return Link(delay_s * source.uniform(0.3, 2), bandwidth * math.exp(source.gauss(0, 0.7)))

    if source.random() < 0.25:
        pairs = itertools.permutations(devices, 2)
        routes = tuple(
            Route(a.name, b.name, link(near, latency_s / 10) if a.region == b.region else link(far, latency_s))
            for a, b in pairs
        )
        return Links(devices=routes)
    return Links(
        regions=tuple(
            Route(a, b, link(near, latency_s / 10) if a == b else link(far, latency_s))
            for a, b in itertools.product(regions, regions)
        )
    )


def _need_bytes(whole: Problem) -> float:
    """Of the model's state and one micro-batch (gpipe: all)."""
    state = whole.state
    elements = sum(math.prod(op.outputs[0].shape_at(1)) for op in whole.flow.graph.ops if op.kind == "parameter")
    held = whole.micro_batches if whole.schedule == "gpipe" else 1
    each = 4 + state.master_bytes + state.gradient_bytes + state.optimizer_bytes
    return elements * each + held * 1.5 * whole.cumulative_saved_bytes[-1]
