"""A lower bound on the step time of any pipeline on a fleet, whatever the order, the subset and the cuts.

For S stages: the S fastest devices pool their speed; stages that receive anything are joined by a forest, whose
latencies are no less than those of the cheapest one (Kruskal's first edges); and every stage but the first receives
at least what its first operators take, over the widest link. A parameter used far apart is either sent, or
keeps all operators between its uses on one device. S is no less than memory asks for.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse.csgraph import minimum_spanning_tree

from isthmus.plan import Certificate
from isthmus.planners.blocks import Blocks
from isthmus.planners.network import Floats, Network
from isthmus.planners.threshold_search import TOLERANCE


def pooled_bound_s(network: Network, blocks: Blocks, micro_batches: int) -> float:
    """min over S of (S + n - 1) * work / (S fastest speeds) + links(S) + shared, in seconds; 0 if nothing fits."""
    work, fastest = float(blocks.work[-1]), float(network.speed.max())
    most = min(len(network.speed), blocks.count)
    sizes = np.arange(1, most + 1)
    balanced = work / np.cumsum(np.sort(network.speed)[::-1])[:most]
    period = np.maximum(balanced, float(np.diff(blocks.work).max(initial=0.0)) / fastest)
    # With a period above the balanced one the fastest devices do more: only total work / speed bounds the fill.
    fill = np.where(period > balanced, work / fastest, sizes * balanced)
    step = fill + (micro_batches - 1) * period + _links(network, blocks, most)
    step[1:] = np.minimum(step[1:] + _sent_s(network, blocks), _kept_together_s(network, blocks, micro_batches))
    step[: _fewest_stages(network, blocks) - 1] = np.inf
    return float(step.min(initial=np.inf)) if np.isfinite(step).any() else 0.0


def step_certificate(bound_s: float, step_s: float, scope: str) -> Certificate | None:
    """What a lower bound on the step proves of a plan; None for a bound of 0, which proves nothing."""
    if bound_s <= 0:
        return None
    bound_s = min(bound_s, step_s)
    gap = step_s / bound_s - 1
    return Certificate(lower_bound=bound_s, gap=gap if gap > 10 * TOLERANCE else 0.0, scope=scope)


def _fewest_stages(network: Network, blocks: Blocks) -> int:
    """So many of the largest devices hold the model's state and one micro-batch."""
    need = sum(v.owned_bytes for v in blocks.variables) + float(blocks.saved[-1])
    return 1 + int(np.searchsorted(np.cumsum(np.sort(network.memory)[::-1]), need))


def _sent_s(network: Network, blocks: Blocks) -> float:
    """Every shared parameter there and back once, over the best link."""
    if len(network.names) == 1:
        return 0.0
    other = ~np.eye(len(network.names), dtype=bool)
    latency, byte_s = (network.latency + network.latency.T)[other], (network.byte_s + network.byte_s.T)[other]
    return sum(float((latency + i.forward_bytes * byte_s).min()) for i in blocks.items if i.per_step)


def _kept_together_s(network: Network, blocks: Blocks, micro_batches: int) -> float:
    """n times the least work between the first and last use of a shared parameter, on the fastest device."""
    spans = [blocks.work[i.uses[-1] + 1] - blocks.work[i.birth] for i in blocks.items if i.per_step]
    return micro_batches * float(min(spans, default=np.inf)) / float(network.speed.max())


def _links(network: Network, blocks: Blocks, most: int) -> Floats:
    """For 1..most stages: the least seconds that one micro-batch spends on links."""
    if most == 1:
        return np.zeros(1)
    taken = np.array([_taken(blocks, boundary) for boundary in range(1, blocks.count)], dtype=np.float64)
    byte_s = float(network.byte_s[~np.eye(len(network.names), dtype=bool)].min())
    forest = _forest(np.minimum(network.latency, network.latency.T))
    links = np.zeros(most)
    for sizes in np.sort(taken, axis=0).T:  # forward, backward: the fewest bytes first
        silent = int((sizes == 0).sum())  # stages that may receive nothing
        links[1:] += np.cumsum(sizes[: most - 1]) * byte_s
        links[1 + silent :] += np.cumsum(forest)[: max(0, most - 1 - silent)]
    return links


def _taken(blocks: Blocks, boundary: int) -> tuple[int, int]:
    """Bytes that a stage starting here receives and returns at least: what its first block takes."""
    items = [blocks.items[number] for number, use in blocks.live[boundary] if use == boundary]
    values = [item for item in items if not item.per_step]
    return sum(i.forward_bytes for i in values), sum(i.backward_bytes for i in values)


def _forest(weight: Floats) -> Floats:
    """Edge weights of a minimum spanning tree, ascending."""
    # Shifted by one second, because scipy takes a weight of zero for a missing edge.
    return np.maximum(np.sort(minimum_spanning_tree(np.triu(weight + 1.0, 1)).data) - 1.0, 0.0)
