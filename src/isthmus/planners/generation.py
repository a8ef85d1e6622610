"""Which devices serve a model, in which order, and where it is cut: for least time per token, or most tokens/s.

A token of one request passes all stages and returns to the first: its latency is what they compute and what the links
take. With several requests in flight the slowest stage or link bounds tokens/s. Chains are grown device by device; the
best cuts of a chain are found by dynamic programming over places where least crosses. The best `BEAM` chains of
each length are grown further: with four devices these are all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from isthmus.combinations import refused
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Fleet
from isthmus.graph import Flow, cuts
from isthmus.graph.serving import ATTENTION
from isthmus.units import format_size

Objective = Literal["latency", "throughput"]
Costs = npt.NDArray[np.float64]
Tables = Mapping[str, tuple[Costs, npt.NDArray[np.bool_]]]
"""Each device's stages by first and last place: seconds of a stage for one token, and whether it fits."""
BEAM = 64
MOST_STAGES = 8
MOST_CUTS = 33
LIMITS = 8  # bounds on a stage's time that are tried for throughput
FRAME_BYTES = 400  # a frame's prefix and header, about


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in order, each on another device."""

    devices: tuple[str, ...]
    boundaries: tuple[int, ...]  # stage k ends before this operator of the serving graph's `Flow.operators`
    token_s: float  # seconds from one token of a request to its next, while no other request is in flight
    tokens_per_s: float  # tokens of all requests, at `at_once` in flight
    at_once: int


@dataclass(frozen=True)
class ServingProblem:
    """The problem of a chain of stages. `context` tokens of each of `at_once` requests are held in caches."""

    flow: Flow
    fleet: Fleet
    context: int = field(kw_only=True)
    at_once: int = field(kw_only=True)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Ends of stages: the narrowest cuts, and the end of the model."""
        found = cuts(self.flow)
        least = min((cut.forward_bytes(self.flow, 1) for cut in found), default=0)
        narrow = [cut.position for cut in found if cut.forward_bytes(self.flow, 1) == least]
        every = max(1, -(-len(narrow) // (MOST_CUTS - 1)))
        return (*narrow[::every], len(self.flow.operators))

    @cached_property
    def crossing_bytes(self) -> dict[int, int]:
        """Bytes of one token by place."""
        return {cut.position: cut.forward_bytes(self.flow, 1) for cut in cuts(self.flow)}

    @cached_property
    def stages(self) -> tuple[Costs, Costs]:
        """FLOPs of one token, and bytes, by first and last place; infinite where there is no stage."""
        starts = (0, *self.places[:-1])
        work, need = (np.full((len(starts), len(starts)), np.inf) for _ in range(2))
        for i, start in enumerate(starts):
            for j, end in enumerate(self.places[i:], i):
                work[i, j], need[i, j] = self.flops(start, end), self.memory_bytes(start, end)
        return work, need

    def flops(self, first: int, end: int) -> int:
        return sum(op.flops_forward.at(1) for op in self.flow.operators[first:end])

    def memory_bytes(self, first: int, end: int) -> int:
        """Weights of a stage, and the caches of all requests."""
        operators = self.flow.operators[first:end]
        named = {ref.op for op in operators for ref in op.refs()}
        held = (op for op in self.flow.graph.ops if op.name in named and op.kind in ("parameter", "buffer"))
        weights = sum(op.outputs[0].nbytes(1) for op in held)
        caches = 0
        for op in operators:
            if op.target == ATTENTION:
                for ref in op.refs()[1:3]:
                    caches += self.flow.by_name[ref.op].outputs[ref.index].nbytes(self.context)
        return weights + caches * self.at_once

    def link_s(self, source: str, target: str, size_bytes: int) -> float:
        if source == target:
            return 0.0
        link = self.fleet.link(source, target)
        return link.latency_s + (size_bytes + FRAME_BYTES) / link.bandwidth_bytes_per_s

    def stage_costs(self, devices: Sequence[str], boundaries: Sequence[int]) -> tuple[list[float], list[int]]:
        """Return seconds of each stage, and bytes from each to the next, for one token."""
        ends = [*boundaries, len(self.flow.operators)]
        stages = zip(devices, [0, *boundaries], ends, strict=True)
        compute = [self.flops(a, b) / self.fleet.device(d).sustained_flops_per_s for d, a, b in stages]
        return compute, [self.crossing_bytes.get(position, 0) for position in boundaries]

    def priced(self, devices: Sequence[str], boundaries: Sequence[int]) -> Chain:
        compute, crossings = self.stage_costs(devices, boundaries)
        hops = zip(devices, devices[1:], crossings, strict=False)
        links = [self.link_s(*hop) for hop in hops] + [self.link_s(devices[-1], devices[0], 0)]
        token_s, slowest_s = sum(compute) + sum(links), max(compute)
        rate = self.at_once / max(token_s, self.at_once * slowest_s, 1e-9)
        return Chain(
            devices=tuple(devices),
            boundaries=tuple(boundaries),
            token_s=token_s,
            tokens_per_s=rate,
            at_once=self.at_once,
        )


def plan_chain(problem: ServingProblem, objective: Objective) -> Chain:
    """The best chain that was found. FleetTooSmall where the model and the caches fit no chain."""
    best: Chain | None = None
    work, need = problem.stages
    tables = {d.name: (work / d.sustained_flops_per_s, need <= d.memory_bytes) for d in problem.fleet.devices}
    grown: list[tuple[str, ...]] = [()]
    for _ in range(min(MOST_STAGES, len(problem.fleet.names), len(problem.places))):
        found: list[tuple[float, tuple[str, ...]]] = []
        for before in grown:
            for name in problem.fleet.names:
                if name not in before:
                    devices = (*before, name)
                    chain, relaxed = _cut(problem, tables, devices, objective)
                    found.append((relaxed, devices))
                    if chain is not None and (best is None or _value(chain, objective) < _value(best, objective)):
                        best = chain
        grown = [devices for _, devices in sorted(found)[:BEAM]]
    if best is None:
        needed = format_size(problem.memory_bytes(0, len(problem.flow.operators)))
        raise FleetTooSmall(
            f"fleet {problem.fleet.name}: weights and the caches of {problem.at_once} requests of {problem.context} "
            f"tokens take {needed}, and no chain of devices has the memory: fewer requests at once take less"
        )
    return best


def chain_of_plan(problem: ServingProblem, devices: Sequence[str], stages: Sequence[int]) -> Chain:
    """The chain of a training plan: `stages` is the stage of each operator. Stages without one are left out, and what
    a stage would run before an operator of an earlier one, it runs behind it. UserError where a device has two, or not
    the memory for the caches."""
    boundaries: list[int] = []
    used = [stages[0]]
    for position, stage in enumerate(stages):
        if stage > used[-1]:
            used.append(stage)
            boundaries.append(position)
    names = [devices[stage] for stage in used]
    if len(set(names)) < len(names):
        raise refused("two stages", "generation", "several stages on one device")
    ends = [*boundaries, len(stages)]
    for name, start, end in zip(names, [0, *boundaries], ends, strict=True):
        needed, room = problem.memory_bytes(start, end), problem.fleet.device(name).memory_bytes
        if needed > room:
            raise FleetTooSmall(
                f"device {name}: weights of the run's plan and caches of {problem.at_once} requests take "
                f"{format_size(needed)}, it has {format_size(room)}: --objective latency plans another chain"
            )
    return problem.priced(names, boundaries)


def _value(chain: Chain, objective: Objective) -> tuple[float, float]:
    return (chain.token_s, 0.0) if objective == "latency" else (-chain.tokens_per_s, chain.token_s)


def _cut(
    problem: ServingProblem, tables: Tables, devices: tuple[str, ...], objective: Objective
) -> tuple[Chain | None, float]:
    """The best cuts of a chain; and its value if memory did not matter, for which it is grown."""
    limits = [np.inf]
    if objective == "throughput":
        whole = [float(tables[name][0][0, -1]) for name in devices]
        limits += [max(whole) * (n + 1) / LIMITS / len(devices) for n in range(2 * LIMITS)]
    best: Chain | None = None
    relaxed = np.inf
    for limit in limits:
        for fits in (True, False):
            boundaries = _least_latency(problem, tables, devices, limit, fits=fits)
            if boundaries is None:
                continue
            chain = problem.priced(devices, boundaries)
            value = chain.token_s if objective == "latency" else -chain.tokens_per_s
            relaxed = min(relaxed, value)
            if fits and (best is None or _value(chain, objective) < _value(best, objective)):
                best = chain
    return best, float(relaxed)


def _least_latency(
    problem: ServingProblem, tables: Tables, devices: tuple[str, ...], limit: float, *, fits: bool
) -> list[int] | None:
    """Boundaries for which a token passes soonest, with no stage above the limit; None where there are none."""
    starts = (0, *problem.places[:-1])
    reached: Costs = np.where(np.arange(len(starts)) == 0, 0.0, np.inf)
    ended: Costs = reached
    chosen: list[npt.NDArray[np.intp]] = []
    for number, name in enumerate(devices):
        compute_s, in_memory = tables[name]
        allowed = (compute_s <= limit) & (in_memory if fits else True)
        ways = reached[:, None] + np.where(allowed, compute_s, np.inf)
        chosen.append(ways.argmin(axis=0))
        ended = ways.min(axis=0)
        if number == len(devices) - 1:
            break
        following = devices[number + 1]
        sent = [problem.link_s(name, following, problem.crossing_bytes.get(end, 0)) for end in problem.places[:-1]]
        reached = np.concatenate(([np.inf], ended[:-1] + np.array(sent)))
    if not np.isfinite(ended[-1]):
        return None
    boundaries: list[int] = []
    at = len(problem.places) - 1
    for back in reversed(chosen[1:]):
        at = int(back[at])  # the start of this stage: `starts[at]` is `places[at - 1]`
        boundaries.append(starts[at])
        at -= 1
    return boundaries[::-1]
