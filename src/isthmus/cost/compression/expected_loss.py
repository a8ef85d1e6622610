"""What packed messages are expected to cost in loss, from trainings that were measured.

A held-out loss at equal steps, relative to the dense model's. Each message of a plan is charged an equal part of what
all packed messages of the measured pipeline cost together: an assumption.

    bf16, int8, top-K   a GPT of 4 blocks, 120 steps, codecs in the evaluation too  (benchmarks/compression_convergence)
    int4, boundaries    a GPT of 8 blocks, 120 steps                                (benchmarks/wan_loss)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from isthmus.plans import Edge, Packing, Replica

MEASURED_ON = "small GPTs after 120 steps"
CODECS = {"bf16": 0.0, "int8": 0.0, "int4": 0.0413 / 14}
"""Increase of the loss by one message; none below that of a milder codec."""
TOPK = {1.0: 0.0, 10.0: 0.205 / 2, 100.0: 0.205 / 2}
"""The same of top-K, by ratio."""
BOUNDARIES = {
    "subspace": {16.0: 0.0, 50.0: 0.0293, 100.0: 0.1702},
    "residual": {50.0: 0.0747, 100.0: 0.1681},
}
"""By method and rate: of a subspace, and of seven bottlenecks."""
BOTTLENECKS = 7


def expected_increase(packing: Packing) -> float:
    """By one message, as a share of the loss; inf where nothing like it was measured."""
    if packing.codec != "topk":
        return CODECS.get(packing.codec, math.inf)
    if packing.ratio > max(TOPK):
        return math.inf
    above = min(r for r in TOPK if r >= packing.ratio)
    below = max(r for r in TOPK if r <= packing.ratio)
    share = math.log(packing.ratio / below) / math.log(above / below) if above > below else 0.0
    return TOPK[below] + share * (TOPK[above] - TOPK[below])


def increase_of(replicas: Iterable[Replica]) -> float:
    """By all packed messages of a plan; those of a replica for its part of the batch."""
    parts = [(r.micro_batches, packed_increase(r.edges)) for r in replicas]
    return sum(count * increase for count, increase in parts) / sum(count for count, _ in parts)


def packed_increase(edges: Iterable[Edge]) -> float:
    """By the packed messages of one replica."""
    packed = [c for e in edges for c in (e.forward_compression, e.backward_compression) if c is not None]
    return sum(expected_increase(c.packing) for c in packed)
