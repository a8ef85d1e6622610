"""Seconds per step of one plan: a row of the closed form (`cost.kernel`), with names, and messages from stage graphs.

FusionLLM's Eq. 3 differs: it counts latency in the bottleneck term and a stage's receives one after another; see
`eq3_step_s`.

Where weight gradients are computed apart (`zero-bubble`), `fill` and a stage's round trip pass the input gradients
alone: those of the weights follow while others work, and lengthen the fill by what is left of them at its end.

A pipeline whose steps overlap (`delayed`) takes `n * period`: nothing fills or drains between steps. But step t + 2
computes at what the update of step t leaves, so two steps take no less than the first stage needs for one: from its
first forward to its last backward, a round trip later, and shared parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from isthmus.cost import kernel
from isthmus.cost.kernel import Floats, Ints, MessageTimes
from isthmus.cost.problem import Problem
from isthmus.cost.stage_costs import StageFlops, compute_s, transfer_s, uplinks_s, wire_s
from isthmus.cost.steady import StageTasks, steady_step_s
from isthmus.plans import Edge, Prediction, SharedParameter
from isthmus.plans.schedule import STEPS_AT_ONCE


class EdgeTime(NamedTuple):
    """Seconds of one edge for one micro-batch; `wire` leaves latency out."""

    source: int
    target: int
    forward_s: float
    backward_s: float
    forward_wire_s: float
    backward_wire_s: float


@dataclass(frozen=True, kw_only=True)
class PipelineTime:
    """The durations of a placed pipeline; stages in order."""

    devices: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    edges: tuple[EdgeTime, ...]
    shared_s: float
    apart_s: tuple[float, ...] = ()
    """Seconds of each stage's weight gradients, within its backward, if computed apart; empty where no stage's are."""
    uplinks_s: tuple[tuple[str, float], ...] = ()
    """Per site with a shared uplink: how long one micro-batch's bytes occupy it."""
    steps: int = 1  # that may be under way at once: two of the schedule `delayed`
    shared: tuple[EdgeTime, ...] = ()  # from each owner of shared parameters to each user, once a step

    @cached_property
    def compute_s(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    @cached_property
    def _row(self) -> tuple[Floats, Floats, list[MessageTimes]]:
        """This pipeline as one candidate of the kernel: forward and backward, and messages."""
        return np.array([self.forward_s]), np.array([self.backward_s]), _messages(self.edges)

    def steady_s(self, in_flight: Sequence[int], micro_batches: int) -> float:
        """Seconds of a steady step; for the schedule `1f1b`, with a device for each stage."""
        forward_s, backward_s, messages = self._row
        held = np.array([in_flight], dtype=np.float64)
        return steady_step_s(
            StageTasks(forward_s, backward_s, held, messages, _messages(self.shared)), 0, micro_batches
        )

    @cached_property
    def _order(self) -> Ints:
        number = {device: k for k, device in enumerate(self.stages_of)}
        return np.array([[number[device] for device in self.devices]])

    @cached_property
    def fill_s(self) -> float:
        return float(kernel.fill_s(*self._row)[0]) - self.hidden_s

    @cached_property
    def hidden_s(self) -> float:
        """Return the part of the weight gradients that nothing waits for: all but the longest rest at the end. Those of
        stage s have the time in which the stages before it compute their input gradients and send them."""
        rest_s, behind_s = 0.0, 0.0
        for s, apart_s in enumerate(self.apart_s):
            behind_s += sum(e.backward_s for e in self.edges if e.target == s)
            rest_s = max(rest_s, apart_s - behind_s)
            behind_s += self.backward_s[s] - apart_s
        return sum(self.apart_s) - rest_s

    @cached_property
    def stages_of(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for stage, device in enumerate(self.devices):
            found.setdefault(device, []).append(stage)
        return found

    @cached_property
    def device_s(self) -> dict[str, float]:
        """Return how long each device computes per micro-batch, all its stages together."""
        loads = kernel.device_loads(self._order, np.array([self.compute_s]))[0].tolist()
        return dict(zip(self.devices, loads, strict=True))

    @cached_property
    def link_s(self) -> dict[tuple[str, str], float]:
        """Return how long one micro-batch's bytes occupy each directed link, of all edges that take it."""
        found: dict[tuple[str, str], float] = {}
        for e, (there, back) in zip(self.edges, kernel.link_loads(self._order, self._row[2]), strict=True):
            source, target = self.devices[e.source], self.devices[e.target]
            if source != target:
                found[source, target], found[target, source] = float(there[0]), float(back[0])
        return found

    @cached_property
    def bottleneck(self) -> tuple[float, str]:
        """(period without throttling, what sets it)."""
        found = [(seconds, f"device {device}") for device, seconds in self.device_s.items()]
        found += [(seconds, f"link {source} -> {target}") for (source, target), seconds in self.link_s.items()]
        found += [(seconds, f"uplink of {region}") for region, seconds in self.uplinks_s]
        return max(found, key=lambda pair: pair[0])

    @cached_property
    def round_trips_s(self) -> tuple[float, ...]:
        """From the start of a micro-batch's F on each stage to the end of its B there, alone in the pipeline."""
        apart = np.array([self.apart_s]) if self.apart_s else None
        return tuple(kernel.round_trips_s(*self._row, apart)[0].tolist())

    def throttled_period_s(self, in_flight: Sequence[int], micro_batches: int) -> float:
        """The period when stage s holds at most `in_flight[s]` micro-batches."""
        return max([self.bottleneck[0], *self.held_up_s(in_flight, micro_batches).values()])

    def held_up_s(self, in_flight: Sequence[int], micro_batches: int) -> dict[int, float]:
        """The period that each stage's limit imposes. The last stage waits for no gradient: its limit imposes none."""
        trips, held = np.array([self.round_trips_s]), np.array([in_flight], dtype=np.float64)
        most = self.steps * micro_batches
        hindered = kernel.hindered_s(trips, held, most)[0].tolist()
        return {s: hindered[s] for s in range(len(self.devices) - 1) if in_flight[s] < most}

    def step_s(self, micro_batches: int, period_s: float | None = None) -> float:
        period = self.bottleneck[0] if period_s is None else period_s
        if self.steps > 1:
            alone_s, busy_s = np.array(max(self.round_trips_s) + self.shared_s), np.array(self.bottleneck[0])
            return float(kernel.overlapping_step_s(alone_s, busy_s, np.array(period), micro_batches))
        return kernel.step_s(self.fill_s, period, micro_batches) + self.shared_s

    def eq3_step_s(self, micro_batches: int) -> float:
        """FusionLLM Eq. 3 with forward and backward: sum(C_p + R_p) + (n_b - 1) * max(C_p, R_p), p a device."""
        receive = [0.0] * len(self.devices)
        for e in self.edges:
            receive[e.target] += e.forward_s + e.backward_s
        received_s = (sum(receive[s] for s in stages) for stages in self.stages_of.values())
        slowest = max(max(pair) for pair in zip(self.device_s.values(), received_s, strict=True))
        return sum(self.compute_s) + sum(receive) + (micro_batches - 1) * slowest


@dataclass(frozen=True, kw_only=True)
class FedPipeline(PipelineTime):
    """A pipeline whose first stage has copies: as each holder feeds it, and in which part of the micro-batches.

    A micro-batch alone goes the slowest way. Of `n` micro-batches a copy does its part, so that it, its links and its
    memory hold up the pipeline for that part of the time. Stages and devices are those of the first holder's way.
    """

    ways: tuple[PipelineTime, ...]
    shares: tuple[float, ...]
    copied: frozenset[int]  # stages

    @cached_property
    def fill_s(self) -> float:
        return max(way.fill_s for way in self.ways)

    @cached_property
    def device_s(self) -> dict[str, float]:
        return _summed((way.device_s, share) for way, share in zip(self.ways, self.shares, strict=True))

    @cached_property
    def link_s(self) -> dict[tuple[str, str], float]:
        return _summed((way.link_s, share) for way, share in zip(self.ways, self.shares, strict=True))

    @cached_property
    def round_trips_s(self) -> tuple[float, ...]:
        """A copy's is multiplied by its part: the step completes so many more micro-batches."""
        return tuple(
            max(
                way.round_trips_s[stage] * (share if stage in self.copied else 1.0)
                for way, share in zip(self.ways, self.shares, strict=True)
            )
            for stage in range(len(self.devices))
        )

    def eq3_step_s(self, micro_batches: int) -> float:
        """Return the time of the slowest way: the paper knows no copies."""
        return max(way.eq3_step_s(micro_batches) for way in self.ways)


def _messages(edges: Iterable[EdgeTime]) -> list[MessageTimes]:
    return [
        MessageTimes(source, target, *(np.array([s]) for s in seconds), sent=np.array([True]))
        for source, target, *seconds in edges
    ]


Ends = TypeVar("Ends")


def _summed(parts: Iterable[tuple[Mapping[Ends, float], float]]) -> dict[Ends, float]:
    found: dict[Ends, float] = {}
    for seconds, share in parts:
        for key, value in seconds.items():
            found[key] = found.get(key, 0.0) + share * value
    return found


def pipeline(
    problem: Problem,
    devices: Sequence[str],
    flops: Sequence[StageFlops],
    edges: Sequence[Edge],
    shared: Sequence[SharedParameter],
) -> PipelineTime:
    """Durations of stages with these FLOPs on these devices; messages have their bytes on the wire.

    Where several holders feed it, the devices are those of the first holder's way. Packing and unpacking take no time
    here: they happen in the lanes that send and receive.
    """
    feeders, last = problem.constraints.feeders, len(devices) - 1
    if len(feeders) < 2:
        return _one_way(problem, devices, flops, edges, shared)
    copied = frozenset({0, last} if problem.constraints.labels_stay else {0})
    along = [[feeder if stage in copied else d for stage, d in enumerate(devices)] for feeder in feeders]
    ways = tuple(_one_way(problem, way, flops, edges, ()) for way in along)
    shares = problem.constraints.shares
    uplinks = _summed((dict(way.uplinks_s), share) for way, share in zip(ways, shares, strict=True))
    first = ways[0]
    return FedPipeline(
        devices=first.devices,
        forward_s=first.forward_s,
        backward_s=first.backward_s,
        apart_s=first.apart_s,
        edges=first.edges,
        uplinks_s=tuple(sorted(uplinks.items())),
        ways=ways,
        shares=shares,
        copied=copied,
        shared_s=_shared_s(problem, shared, along),
    )


def _shared_s(problem: Problem, shared: Sequence[SharedParameter], ways: Sequence[Sequence[str]]) -> float:
    """Shared parameters' values there, and their gradients back: once for each device that runs a user."""
    return sum(
        transfer_s(problem, owner, user, p.size_bytes) + transfer_s(problem, user, owner, p.gradient_bytes)
        for p in shared
        for owner in [ways[0][p.owner]]
        for number in p.users
        for user in dict.fromkeys(way[number] for way in ways)
    )


def _one_way(
    problem: Problem,
    devices: Sequence[str],
    flops: Sequence[StageFlops],
    edges: Sequence[Edge],
    shared: Sequence[SharedParameter],
) -> PipelineTime:

    def edge(source: int, target: int, forward_bytes: int, backward_bytes: int) -> EdgeTime:
        there, back = (devices[source], devices[target]), (devices[target], devices[source])
        return EdgeTime(
            source,
            target,
            transfer_s(problem, *there, forward_bytes),
            transfer_s(problem, *back, backward_bytes),
            wire_s(problem, *there, forward_bytes),
            wire_s(problem, *back, backward_bytes),
        )

    sent, bytes_of = list[tuple[str, str, int]](), dict[tuple[int, int], tuple[int, int]]()
    for e in edges:
        there, back = (devices[e.source], devices[e.target]), (devices[e.target], devices[e.source])
        sent += [(*there, e.forward_wire_bytes), (*back, e.backward_wire_bytes)]
    for p in shared:
        for user in p.users:
            there_bytes, back_bytes = bytes_of.get((p.owner, user), (0, 0))
            bytes_of[p.owner, user] = there_bytes + p.size_bytes, back_bytes + p.gradient_bytes
    return PipelineTime(
        devices=tuple(devices),
        uplinks_s=tuple(sorted(uplinks_s(problem.fleet, sent).items())),
        forward_s=tuple(compute_s(problem, d, f.forward) for d, f in zip(devices, flops, strict=True)),
        backward_s=tuple(compute_s(problem, d, f.backward) for d, f in zip(devices, flops, strict=True)),
        apart_s=tuple(compute_s(problem, d, f.apart) for d, f in zip(devices, flops, strict=True) if problem.splits),
        edges=tuple(edge(e.source, e.target, e.forward_wire_bytes, e.backward_wire_bytes) for e in edges),
        shared=tuple(edge(*ends, *sizes) for ends, sizes in bytes_of.items()),
        steps=STEPS_AT_ONCE.get(problem.schedule, 1),
        shared_s=_shared_s(problem, shared, [devices]),
    )


def together(replicas: Sequence[Prediction], sync_s: float) -> Prediction:
    """Predict replicas that run side by side and then average for `sync_s`: the slowest sets the pace."""
    slowest = max(replicas, key=lambda p: p.step_s)
    return msgspec.structs.replace(
        slowest,
        step_s=slowest.step_s + sync_s,
        sync_s=sync_s,
        eq3_step_s=max(p.eq3_step_s for p in replicas) + sync_s,
    )


def prediction(times: PipelineTime, in_flight: Sequence[int], micro_batches: int) -> Prediction:
    """Predict a step of a pipeline when stage s holds at most `in_flight[s]` micro-batches."""
    period = times.throttled_period_s(in_flight, micro_batches)
    slowest, bottleneck = times.bottleneck
    if period > slowest:
        limits = times.held_up_s(in_flight, micro_batches)
        held_up = max(limits, key=lambda s: limits[s])
        bottleneck = f"memory of device {times.devices[held_up]} ({in_flight[held_up]} micro-batches in flight)"
    return Prediction(
        step_s=times.step_s(micro_batches, period),
        period_s=period,
        fill_s=times.fill_s,
        micro_batches=micro_batches,
        eq3_step_s=times.eq3_step_s(micro_batches),
        bottleneck=bottleneck,
    )
