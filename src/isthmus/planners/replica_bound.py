"""A lower bound on the step time of any plan of two replicas or more.

With R replicas of speeds S_r (the sum over their devices), replica r completes at most 1 + (T - w / fastest) S_r / w
micro-batches of work w in a step of T seconds; all of them together M. So

    T >= w / fastest + (M - R) w / sum(S)

and the averaging comes on top: whatever the collective, it has two rounds at least, and all members of a group of R
together send 2 (R - 1) times what they sum, which at best spreads over all N (N - 1) links, once in a period.
"""

from __future__ import annotations

import numpy as np

from isthmus.planners.blocks import Blocks
from isthmus.planners.network import Network


def replicas_bound_s(
    network: Network, blocks: Blocks, micro_batches: int, gradient_bytes: float, period: int = 1
) -> float:
    """The least over all numbers of replicas, in seconds; infinite where not even two fit."""
    most = min(len(network.names), micro_batches, _most_by_memory(network, blocks))
    if most < 2:
        return float("inf")
    count = np.arange(2, most + 1)
    work, other = float(blocks.work[-1]), ~np.eye(len(network.names), dtype=bool)
    link_s = 2 * (count - 1) * gradient_bytes / other.sum() * float(network.byte_s[other].min())
    averaging = np.maximum(2 * float(network.latency[other].min()), link_s)
    compute = work / float(network.speed.max()) + (micro_batches - count) * work / float(network.speed.sum())
    return float((compute + averaging / period).min())


def _most_by_memory(network: Network, blocks: Blocks) -> int:
    """Each replica holds the model's state and one micro-batch."""
    need = sum(v.owned_bytes for v in blocks.variables) + float(blocks.saved[-1])
    return int(network.memory.sum() // need) if need else len(network.names)
