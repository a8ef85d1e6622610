"""A lower bound on the step time of any plan of two replicas or more.

With R replicas of speeds S_r (the sum over their devices), replica r completes at most 1 + (T - fill) / period
micro-batches of work w in T seconds, with

    fill    >= w / fastest + the links of as many stages as memory asks for
    period  >= w / S_r, and the largest block / fastest

so all of them together complete M only if T >= fill + (M - R) * max(w / sum(S), block / fastest / R).

Averaging comes on top: whatever the collective, it has two rounds at least, and all members of a group of R together
send 2 (R - 1) times what they sum, which at best spreads over all N (N - 1) links, once in a period.
"""

from __future__ import annotations

import numpy as np

from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork
from isthmus.planners.bounds import LinkBounds, fewest_stages


def replicas_bound_s(
    network: FleetNetwork, blocks: Blocks, micro_batches: int, gradient_bytes: float, period: int = 1
) -> float:
    """The least over all numbers of replicas, in seconds; infinite where not even two fit."""
    devices, stages = len(network.names), fewest_stages(network, blocks)
    if stages > min(devices, blocks.count):
        return float("inf")
    most = min(devices // stages, micro_batches, _most_by_memory(network, blocks))
    if most < 2:
        return float("inf")
    count = np.arange(2, most + 1)
    work, fastest = float(blocks.work[-1]), float(network.speed.max())
    fill_s = work / fastest + float(LinkBounds(network, blocks).sums()[stages - 1])
    block_s = float(np.diff(blocks.work).max(initial=0.0)) / fastest
    period_s = np.maximum(work / float(network.speed.sum()), block_s / count)
    link_s = 2 * (count - 1) * gradient_bytes / (devices * (devices - 1)) * float(network.kind_byte_s.min())
    rounds_s = 2 * float(network.kind_latency.min()) if gradient_bytes else 0.0
    return float((fill_s + (micro_batches - count) * period_s + np.maximum(rounds_s, link_s) / period).min())


def _most_by_memory(network: FleetNetwork, blocks: Blocks) -> int:
    """Each replica holds the model's state and one micro-batch."""
    need = sum(v.owned_bytes for v in blocks.variables) + float(blocks.saved[-1])
    return int(network.memory.sum() // need) if need else len(network.names)
