"""GPT-3 trained over DT-FM's networks, simulated: what a layout, and Megatron and ZeRO-3 beside it, take for a step.

Every strategy gets the same graph, the same micro-batches of one sequence, and devices at `UTILISATION` of their peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import msgspec
import numpy as np
from gpt3 import GPT3_1_3B, GPT3_6_7B, GPT3_13B, Shape, gpt3, model_flops, parts_of
from peers import PeerStep, Training, megatron, zero3

from isthmus.cost import Problem, build_replicas, parameter_state
from isthmus.cost.blocks import Blocks
from isthmus.errors import FleetTooSmall
from isthmus.experiments import RunSpec
from isthmus.fleet import Fleet, built_in_fleet
from isthmus.graph import Flow
from isthmus.planners.placement import PLACEMENTS, PlacementProblem, StageGrouping
from isthmus.planners.placement.grouping import shuffled
from isthmus.planners.placement.on_fleet import Search, equal_layouts
from isthmus.planners.search.auto import auto
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s

FLEETS = (*(f"dtfm-case{n}" for n in range(1, 6)), "fluidstack")
UTILISATION = 0.5
"""Of the devices' peak while they compute: what the paper's introduction assumes. It gives no measurement."""
SEEDS = (2022, 2023, 2024)
"""Of the paper's random layouts, whose mean it reports."""
STRATEGIES = ("random", "dtfm-genetic", "auto")
STAGES = 8
BATCHES, LAYERS = (1024, 2048, 4096), (24, 32, 40)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    shape: Shape
    batch: int
    """Sequences in a step."""


WORKLOADS = (
    *(Workload(shape=GPT3_1_3B._replace(layers=n), batch=batch) for n in LAYERS for batch in BATCHES),
    Workload(shape=GPT3_6_7B, batch=1024),
    Workload(shape=GPT3_13B, batch=1024),
)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Of one strategy; means, where it is several layouts."""

    step_s: float | None
    """Simulated; of a peer, its closed form. None where it does not fit."""
    closed_form_s: float | None = None
    setting: str
    plan_s: float = 0.0
    """How long planning took."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    fleet: str
    model: str
    layers: int
    batch: int
    model_flops: int
    """Of a step, each counted once although a part is computed twice."""
    peak_flops_per_s: float
    figures: dict[str, Figure]

    def step_s(self, strategy: str) -> float | None:
        return self.figures[strategy].step_s if strategy in self.figures else None

    def pflops(self, strategy: str) -> float | None:
        step_s = self.step_s(strategy)
        return None if step_s is None else self.model_flops / step_s / 1e15

    def of_peak(self, strategy: str) -> float | None:
        step_s = self.step_s(strategy)
        return None if step_s is None else self.model_flops / step_s / self.peak_flops_per_s

    def over(self, strategy: str, other: str) -> float | None:
        """How many times as long the other's step is."""
        mine, theirs = self.step_s(strategy), self.step_s(other)
        return None if mine is None or theirs is None else theirs / mine


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows are wanted."""

    fleets: tuple[str, ...] = FLEETS
    workloads: tuple[Workload, ...] = WORKLOADS
    strategies: tuple[str, ...] = STRATEGIES
    utilisation: float = UTILISATION


def rows(question: Question) -> Iterator[Row]:
    for name in question.fleets:
        peak = built_in_fleet(name)
        fleet = slowed(peak, question.utilisation)
        for workload in question.workloads:
            shape = workload.shape
            yield Row(
                fleet=name,
                model=shape.name,
                layers=shape.layers,
                batch=workload.batch,
                model_flops=workload.batch * model_flops(shape),
                peak_flops_per_s=sum(device.flops_per_s for device in peak.devices),
                figures={**ours(fleet, workload, question.strategies), **peers(fleet, workload)},
            )


def slowed(fleet: Fleet, utilisation: float) -> Fleet:
    devices = (msgspec.structs.replace(d, flops_per_s=utilisation * d.flops_per_s) for d in fleet.devices)
    return msgspec.structs.replace(fleet, devices=tuple(devices))


def ours(fleet: Fleet, workload: Workload, wanted: tuple[str, ...]) -> dict[str, Figure]:
    problem = Problem(
        flow=_flow(workload.shape),
        fleet=fleet,
        micro_batch_size=1,
        micro_batches=workload.batch,
        state=parameter_state("adam", narrow=True),
    )
    strategies: Mapping[str, tuple[Callable[[], Plan], ...]] = {
        "random": tuple(lambda seed=seed: placed(problem, one_layout, seed) for seed in SEEDS),
        "dtfm-genetic": (lambda: placed(problem, PLACEMENTS["dtfm-genetic"], 0),),
        "auto": (lambda: auto(problem, lambda plan: simulated_s(plan, fleet)),),
    }
    return {name: figure(fleet, planners) for name, planners in strategies.items() if name in wanted}


@cache
def _flow(shape: Shape) -> Flow:
    return Flow(gpt3(shape, checkpointed=True))


def placed(problem: Problem, search: Search, seed: int) -> Plan:
    """Equal stages and replicas as in the paper, eight of each or, where they do not fit, twice the stages.

    Raises FleetTooSmall where the model does not even fit in one replica.
    """
    stages, devices, blocks = STAGES, len(problem.fleet.names), Blocks(problem)
    while True:
        try:
            return build_replicas(problem, equal_layouts(blocks, stages, search, seed), planner="placed")
        except FleetTooSmall:
            stages *= 2
            if stages > devices:
                raise


def one_layout(problem: PlacementProblem, seed: int) -> StageGrouping:
    """Devices in random order: nothing is searched, not even who hands over to whom."""
    devices = shuffled(problem, np.random.default_rng(seed))
    return StageGrouping(devices=devices, data_parallel_s=0.0, pipeline_s=0.0)


def figure(fleet: Fleet, planners: tuple[Callable[[], Plan], ...]) -> Figure:
    start = time.perf_counter()
    try:
        plans = [planner() for planner in planners]
    except FleetTooSmall:
        return Figure(step_s=None, setting="does not fit")
    taken_s = (time.perf_counter() - start) / len(plans)
    counts = sorted({len(replica.stages) for replica in plans[0].replicas})
    stages = f"{counts[0]}-{counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return Figure(
        step_s=statistics.fmean(simulated_s(plan, fleet) for plan in plans),
        closed_form_s=statistics.fmean(plan.predicted.step_s for plan in plans),
        setting=f"{stages} x {len(plans[0].replicas)}",
        plan_s=taken_s,
    )


def simulated_s(plan: Plan, fleet: Fleet) -> float:
    spec = RunSpec(steps=1, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)
    return steady_step_s(simulate(plan, fleet, spec))


def peers(fleet: Fleet, workload: Workload) -> dict[str, Figure]:
    parts = parts_of(workload.shape, checkpointed=True)
    training = Training(shape=workload.shape, parts=parts, batch=workload.batch, fleet=fleet)
    orders = [[fleet.names[k] for k in np.random.default_rng(seed).permutation(len(fleet.names))] for seed in SEEDS]
    return {
        "Megatron": _peer([megatron(training, order) for order in orders]),
        "Megatron, in order": _peer([megatron(training, fleet.names)]),
        "ZeRO-3": _peer([zero3(training, order) for order in orders]),
        "ZeRO-3, in order": _peer([zero3(training, fleet.names)]),
    }


def _peer(steps: list[PeerStep]) -> Figure:
    mean_s = statistics.fmean(step.step_s for step in steps)
    return Figure(step_s=mean_s if mean_s < float("inf") else None, setting=steps[0].setting)
