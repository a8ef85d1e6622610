"""Megatron and ZeRO-3 as DT-FM describes them (its sections 9 and 10.2): closed forms on the same links and speeds.

Nothing here is measured. Where something had to be assumed, it is what favours the peer: collectives are rings whose
messages follow each other without a gap, so that each link's latency counts once, and ZeRO-3 gathers the next layer's
parameters while it computes. Megatron's pipeline waits for its messages, as its 1F1B does: overlapping them with
computation is DT-FM's own contribution (its section 3.5).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpt3 import TOKENS, Part, Shape

from isthmus.fleet import Fleet

DEGREES = (1, 2, 4, 8)
"""Of each kind of parallelism; the paper's grid."""
STATE_BYTES = 18
"""Per parameter: weight and gradient in use, fp32 copy, two tensors of Adam."""
GRADIENT_BYTES, WEIGHT_BYTES, ACTIVATION_BYTES = 4, 2, 2


class Degrees(NamedTuple):
    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return f"{self.tensor} x {self.pipeline} x {self.data}"


class PeerStep(NamedTuple):
    """Seconds of a step, and what the grid search settled on."""

    step_s: float
    setting: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on devices that are alike."""

    shape: Shape
    parts: Sequence[Part]
    """In order: embedding, attention and MLP of each layer, head."""
    batch: int
    """Sequences in a step."""
    fleet: Fleet

    def stages(self, count: int) -> list[Sequence[Part]]:
        """As many layers in each; the embedding belongs to the first and the head to the last."""
        each = (len(self.parts) - 2) // count
        ends = [0, *(1 + k * each for k in range(1, count)), len(self.parts)]
        return [self.parts[a:b] for a, b in itertools.pairwise(ends)]

    def work_s(self, parts: Sequence[Part]) -> float:
        """One sequence, forward and backward, on one device."""
        return sum((p.forward + p.backward).at(1) for p in parts) / self.flops_per_s

    @property
    def stream_bytes(self) -> int:
        """Activations of one sequence between two layers."""
        return TOKENS * self.shape.width * ACTIVATION_BYTES

    @property
    def flops_per_s(self) -> float:
        return min(device.flops_per_s for device in self.fleet.devices)

    @property
    def memory_bytes(self) -> int:
        return min(device.memory_bytes for device in self.fleet.devices)


def ring_s(fleet: Fleet, members: Sequence[str], size_bytes: float, rounds: int) -> float:
    """`rounds` times around all but one hop of a ring that holds `size_bytes`: 1 gathers or scatters, 2 sums."""
    if len(members) < 2:
        return 0.0
    hops = [fleet.link(a, b) for a, b in itertools.pairwise((*members, members[0]))]
    latency_s = sum(link.latency_s for link in hops) - min(link.latency_s for link in hops)
    slowest = min(link.bandwidth_bytes_per_s for link in hops)
    return rounds * (latency_s + (len(members) - 1) * size_bytes / len(members) / slowest)


def megatron(training: Training, order: Sequence[str]) -> PeerStep:
    """The best of the grid with ranks on devices in this order; infinite where nothing fits."""
    found = (
        PeerStep(_megatron_s(training, order, degrees), str(degrees))
        for degrees in itertools.starmap(Degrees, itertools.product(DEGREES, repeat=3))
        if math.prod(degrees) == len(order)
    )
    return min(found, key=lambda step: step.step_s)


def _megatron_s(training: Training, order: Sequence[str], degrees: Degrees) -> float:
    parts = training.stages(degrees.pipeline)
    if training.shape.layers % degrees.pipeline or not _fits(training, parts, degrees):
        return float("inf")
    ranks = [[_tensor_group(order, degrees, s, r) for r in range(degrees.data)] for s in range(degrees.pipeline)]
    slowest_s = max(
        _pipeline_s(training, parts, stages, training.batch // degrees.data) for stages in zip(*ranks, strict=True)
    )
    return slowest_s + max(_average_s(training.fleet, part, row) for part, row in zip(parts, ranks, strict=True))


def _tensor_group(order: Sequence[str], degrees: Degrees, stage: int, replica: int) -> Sequence[str]:
    """Megatron counts ranks by tensor first, then data, then pipeline."""
    first = (stage * degrees.data + replica) * degrees.tensor
    return order[first : first + degrees.tensor]


def _fits(training: Training, stages: Sequence[Sequence[Part]], degrees: Degrees) -> bool:
    """State, and what 1F1B keeps of its micro-batches, a sequence each."""
    need = (
        STATE_BYTES * sum(p.parameters for p in parts) + (len(stages) - k) * sum(p.kept_bytes.at(1) for p in parts)
        for k, parts in enumerate(stages)
    )
    return max(need) / degrees.tensor <= training.memory_bytes


def _pipeline_s(
    training: Training, parts: Sequence[Sequence[Part]], stages: Sequence[Sequence[str]], micro_batches: int
) -> float:
    """1F1B: fill + (n - 1) * period, a sequence in each micro-batch.

    The period is what the busiest stage does for a micro-batch: compute, the sums over its tensor-parallel group, and
    exchanging with both neighbours, activations one way and gradients the other at once. Or it is a stage's round trip
    over the micro-batches that it holds.
    """
    # Attention and MLP of each layer: forward, once more because it kept nothing, and backward.
    sums = 3 * 2 * training.shape.layers // len(stages)
    work_s = [
        training.work_s(part) / len(group) + sums * ring_s(training.fleet, group, training.stream_bytes, 2)
        for part, group in zip(parts, stages, strict=True)
    ]
    exchange_s = [_exchange_s(training, a, b) for a, b in itertools.pairwise(stages)]
    busy_s = [w + a + b for w, a, b in zip(work_s, (0.0, *exchange_s), (*exchange_s, 0.0), strict=True)]
    round_trips_s = [sum(work_s[k:]) + 2 * sum(exchange_s[k:]) for k in range(len(stages))]
    held_up_s = [trip_s / (len(stages) - k) for k, trip_s in enumerate(round_trips_s)]
    return round_trips_s[0] + (micro_batches - 1) * max(*busy_s, *held_up_s)


def _exchange_s(training: Training, stage: Sequence[str], following: Sequence[str]) -> float:
    """Activations one way and gradients the other, until the last pair of ranks is done."""
    pairs = [pair for a, b in zip(stage, following, strict=True) for pair in ((a, b), (b, a))]
    return max(training.fleet.link(a, b).transfer_s(training.stream_bytes) for a, b in pairs)


def _average_s(fleet: Fleet, parts: Sequence[Part], row: Sequence[Sequence[str]]) -> float:
    """Gradients of a stage, each tensor-parallel rank with its like in the other replicas. `row`: their groups."""
    size_bytes = GRADIENT_BYTES * sum(p.parameters for p in parts) / len(row[0])
    return max(ring_s(fleet, ring, size_bytes, 2) for ring in zip(*row, strict=True))


def zero3(training: Training, order: Sequence[str]) -> PeerStep:
    """Parameters sharded over all devices: gathered for the forward and again for the backward, gradients scattered.

    Each device takes as many of its sequences at once as fit, and layers pass one after another.
    """
    devices, passing = len(order), [p for p in training.parts if p.parameters]
    parameters = sum(p.parameters for p in training.parts)
    # Two whole layers are there at once, the next one being gathered.
    whole = 2 * (GRADIENT_BYTES + WEIGHT_BYTES) * max(p.parameters for p in training.parts)
    room = training.memory_bytes - STATE_BYTES * parameters / devices - whole
    own = training.batch // devices
    at_once = min(own, int(room // sum(p.kept_bytes.at(1) for p in training.parts)))
    if at_once < 1:
        return PeerStep(float("inf"), "-")
    passes = math.ceil(own / at_once)
    moved_s = sum(
        ring_s(training.fleet, order, size * p.parameters, 1)
        for p in passing
        for size in (WEIGHT_BYTES, WEIGHT_BYTES, GRADIENT_BYTES)
    )
    return PeerStep(max(passes * moved_s, own * training.work_s(training.parts)), f"{passes} passes")
