"""How long a step of a variant takes on the virtual clock, by network and order of computation.

Each has the number of micro-batches that suits it best. The numbers of a training do not depend on it, except with
top-K, which chooses within a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import msgspec
from networks import NETWORKS, Network, Order, Step, bound_s, step_of
from twin import FLOPS_PER_S, LINK, MICRO_BATCHES, STAGES, Variant, fleet

from isthmus.cost import build_plan
from isthmus.graph import Cut, Flow, cuts
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan

COUNTS = (4, 8, 16, MICRO_BATCHES)
TOP_K = ("uniform", "adatopk", "just-enough")


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, and bytes on the busiest link of one of `MICRO_BATCHES` micro-batches."""

    steps: dict[Order, dict[Network, Step]]
    bound_s: float
    """Over TCP."""
    forward_bytes: int
    backward_bytes: int


def times_of(variant: Variant) -> Times:
    plan = plan_of(variant)
    orders: tuple[Order, ...] = ("delayed",) if variant.delayed else ("1f1b", "deep")
    counts = (MICRO_BATCHES,) if variant.compression in TOP_K else COUNTS
    plans = [plan_of(variant, count) for count in counts]

    def best(network: Network, order: Order) -> Step:
        return min((step_of(p, LINK, FLOPS_PER_S, network, order) for p in plans), key=lambda step: step.seconds)

    return Times(
        steps={order: {network: best(network, order) for network in NETWORKS} for order in orders},
        bound_s=bound_s(plan, LINK, FLOPS_PER_S),
        forward_bytes=max(e.forward_wire_bytes for e in plan.replica.edges),
        backward_bytes=max(e.backward_wire_bytes for e in plan.replica.edges),
    )


@functools.cache
def plan_of(variant: Variant, micro_batches: int = MICRO_BATCHES) -> Plan:
    """A block a stage, cut where least crosses near its end; messages packed as the variant has it."""
    prepared = prepared_of(variant.method, variant.rate, micro_batches)
    problem = prepared.problem(fleet())
    constraints = msgspec.structs.replace(problem.constraints, compression=variant.packing)
    places = places_of(prepared.flow, range(STAGES - 1))
    return build_plan(replace(problem, constraints=constraints), fleet().names, places, planner="a block a stage")


@functools.cache
def prepared_of(method: str, rate: float, micro_batches: int) -> Prepared:
    """Of the model alone: variants that train it otherwise share it."""
    return prepare(Variant(name="", method=method, rate=rate).job(micro_batches))


def places_of(flow: Flow, blocks: Iterable[int]) -> list[int]:
    """Behind each of these blocks, where least crosses."""

    def crossing(cut: Cut) -> int:
        return cut.forward_bytes(flow, 1) + cut.backward_bytes(flow, 1)

    legal = cuts(flow)
    return [min((c for c in legal if _ends(flow, c, block)), key=crossing).position for block in blocks]


def _ends(flow: Flow, cut: Cut, block: int) -> bool:
    """Whether the cut lies between the MLP of a block and the attention of the next."""
    before, after = f"blocks.{block}.mlp", f"blocks.{block + 1}.attention"
    position = {op.name: number for number, op in enumerate(flow.operators)}
    first = max(position[op.name] for op in flow.operators if op.module.startswith(f"{before}.project"))
    last = min(position[op.name] for op in flow.operators if op.module.startswith(f"{after}."))
    return first < cut.position <= last
