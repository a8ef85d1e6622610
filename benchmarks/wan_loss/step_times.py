"""How long a step of a variant takes: under the peer's rules, with ours on the virtual clock, and at the least with a
delay of one step."""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

import msgspec
from twin import FLOPS_PER_S, LINK, MICRO_BATCHES, STAGES, Variant, fleet

from isthmus.cost import build_plan, plan_compression
from isthmus.experiments import RunSpec
from isthmus.graph import Cut, Flow, cuts
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s
from training import packing_of


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step, and bytes per micro-batch on the busiest link."""

    peer_s: float
    ours_s: float
    delayed_s: float
    """Without fill: the longest of any stage's compute and any link's direction."""
    forward_bytes: int
    backward_bytes: int
    wire_per_compute: float


class Work(NamedTuple):
    """Of one micro-batch, by stage: seconds of compute, and of the message to the next stage and back from it."""

    forward_s: list[float]
    backward_s: list[float]
    there_s: list[float]
    back_s: list[float]


def times_of(variant: Variant) -> Times:
    plan = plan_of(variant, prepare(variant.job()))
    edges = sorted((e for e in plan.replica.edges if e.target == e.source + 1), key=lambda e: e.source)
    assert len(edges) == len(plan.replica.edges) == STAGES - 1, "messages go to the next stage only"
    there, back = [e.forward_wire_bytes for e in edges], [e.backward_wire_bytes for e in edges]
    work = Work(
        [s.flops_forward / FLOPS_PER_S for s in plan.stages],
        [s.flops_backward / FLOPS_PER_S for s in plan.stages],
        [LINK.latency_s + size / LINK.bandwidth_bytes_per_s for size in there],
        [LINK.latency_s + size / LINK.bandwidth_bytes_per_s for size in back],
    )
    compute_s = max(map(sum, zip(work.forward_s, work.backward_s, strict=True)))
    wire_s = max(*there, *back) / LINK.bandwidth_bytes_per_s
    spec = RunSpec(steps=3, micro_batches=MICRO_BATCHES, micro_batch_size=1)
    return Times(
        peer_s=peer_step_s(work, MICRO_BATCHES),
        ours_s=steady_step_s(simulate(plan, fleet(), spec)),
        delayed_s=max(compute_s, wire_s) * MICRO_BATCHES,
        forward_bytes=max(there),
        backward_bytes=max(back),
        wire_per_compute=wire_s / compute_s,
    )


def plan_of(variant: Variant, prepared: Prepared) -> Plan:
    """A block a stage, cut where least crosses near its end."""
    problem, flow = prepared.problem(fleet()), prepared.flow
    done, legal = problem.cumulative_flops, cuts(flow)

    def crossing(cut: Cut) -> int:
        return cut.forward_bytes(flow, 1) + cut.backward_bytes(flow, 1)

    places = [min((c for c in legal if _ends(flow, c, k)), key=crossing).position for k in range(STAGES - 1)]
    assert len(done) > places[-1]
    plan = build_plan(problem, fleet().names, places, planner="a block a stage")
    if variant.codec:
        packing = packing_of(variant.codec)
        method = "uniform" if packing.codec == "topk" else packing.codec
        plan = plan_compression(method, problem, plan, packing.ratio)
    return plan


def _ends(flow: Flow, cut: Cut, block: int) -> bool:
    """Whether the cut lies between the MLP of a block and the attention of the next."""
    before, after = f"blocks.{block}.mlp", f"blocks.{block + 1}.attention"
    position = {op.name: number for number, op in enumerate(flow.operators)}
    first = max(position[op.name] for op in flow.operators if op.module.startswith(f"{before}.project"))
    last = min(position[op.name] for op in flow.operators if op.module.startswith(f"{after}."))
    return first < cut.position <= last


def peer_step_s(work: Work, micro_batches: int) -> float:
    """Schedule1F1B of torch.distributed.pipelining by the yardstick's rules: all that a device is sent comes in over
    one wire, one message after the other, each with its latency; a device computes in a fixed order and waits for what
    the next computation takes."""
    stages = len(work.forward_s)
    todo = [deque(_order(s, stages, micro_batches)) for s in range(stages)]
    here = {(0, "F", m) for m in range(micro_batches)} | {(stages - 1, "B", m) for m in range(micro_batches)}
    computes, wire_free, end_s = [False] * stages, [0.0] * stages, 0.0
    events: list[tuple[float, int, str, str, int]] = []

    def start(stage: int, now_s: float) -> None:
        if todo[stage] and not computes[stage] and (stage, *todo[stage][0]) in here:
            kind, m = todo[stage].popleft()
            computes[stage] = True
            took_s = (work.forward_s if kind == "F" else work.backward_s)[stage]
            heapq.heappush(events, (now_s + took_s, stage, "computed", kind, m))

    for stage in range(stages):
        start(stage, 0.0)
    while events:
        now_s, stage, what, kind, m = heapq.heappop(events)
        end_s = now_s
        if what == "came":
            here.add((stage, kind, m))
        else:
            computes[stage] = False
            target = stage + (1 if kind == "F" else -1)
            if 0 <= target < stages:
                took_s = work.there_s[stage] if kind == "F" else work.back_s[target]
                wire_free[target] = max(now_s, wire_free[target]) + took_s
                heapq.heappush(events, (wire_free[target], target, "came", kind, m))
        start(stage, now_s)
    return end_s


def _order(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    warmup = min(micro_batches, stages - stage)
    order = [("F", m) for m in range(warmup)]
    for m in range(micro_batches):
        order.append(("B", m))
        if m + warmup < micro_batches:
            order.append(("F", m + warmup))
    return order


def original_peer_s(message_bytes: int, micro_batches: int = 64) -> float:
    """The peer's rules on the original: 524,288 tokens, 200 Mbit/s and 50 ms; published are 100.5 s for 1,024 numbers
    of two bytes a token, and 19.9 s for 160."""
    tokens = 524_288 // micro_batches
    link_s, compute_s = 0.05 + tokens * message_bytes / 25e6, 1.43 / micro_batches
    links = [link_s] * (STAGES - 1)
    return peer_step_s(Work([compute_s / 3] * STAGES, [compute_s * 2 / 3] * STAGES, links, links), micro_batches)
