"""Planning problems by the size of their fleets: those of `benchmarks/auto`, and regions of devices that are alike;
captured models on the former."""

from __future__ import annotations

import random

from captured import captured, with_model
from cases import case_of

from isthmus.cost import Problem, parameter_state
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.graph import Flow
from models import KINDS, model

CAPTURED = 1000  # the first seed of captured models
MODELS = ("gpt", "tied gpt", "llama", "tied llama", "unet", "resnet", "towers")


def sized_problem(seed: int, low: int, high: int) -> Problem:
    """Every third is of alike devices, but for captured models."""
    source = random.Random(f"bounds {seed} {low} {high}")
    devices = source.randint(low, high)
    if seed >= CAPTURED:
        return with_model(case_of(source, devices, 16, f"captured-{seed}"), captured(MODELS[seed % len(MODELS)]))
    if seed % 3 == 2:
        return _alike(source, devices, f"alike-{seed}")
    units = source.choice((5, 8, 10)) if high <= 6 else source.choice((8, 16, 32))
    return case_of(source, devices, units, f"bounds-{seed}")


def _alike(source: random.Random, count: int, name: str) -> Problem:
    """One to four regions, each with one kind of device; the model takes a device about a second per micro-batch."""
    flow = Flow(model(source, source.choice(KINDS), source.choice((8, 16, 24))))
    work = float(sum(op.flops_forward.at(2) + op.flops_backward.at(2) for op in flow.operators))
    regions = [f"r{k}" for k in range(source.randint(1, min(4, count)))]
    speeds = {region: work * source.choice((0.5, 1.0, 2.0)) for region in regions}
    devices = tuple(
        Device(name=f"d{k}", region=region, flops_per_s=speeds[region], memory_bytes=1 << 50)
        for k, region in enumerate(regions[k % len(regions)] for k in range(count))
    )
    near, far, latency_s = 10 ** source.uniform(3, 5), 10 ** source.uniform(2, 4), 10 ** source.uniform(-3, -1)
    routes = tuple(
        Route(a, b, Link(latency_s / 10, near) if a == b else Link(latency_s, far)) for a in regions for b in regions
    )
    return Problem(
        flow=flow,
        fleet=Fleet(name=name, devices=devices, links=Links(regions=routes)),
        micro_batch_size=2,
        micro_batches=source.choice((4, 8, 16, 32)),
        state=parameter_state("adamw"),
    )
