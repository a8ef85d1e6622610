"""A lower bound on the step time of any pipeline on a fleet, whatever the order, the subset and the cuts.

For S stages: the S fastest devices pool their speed; stages that receive anything are joined by a forest, whose
latencies are no less than `spanning` says; and every stage but the first receives at least what its first operators
take, over a link of such a forest, one of which is the slowest and sets the period. A parameter used far apart is
either sent, or keeps all operators between its uses on one device. S is no less than memory asks for.
"""

from __future__ import annotations

import numpy as np

from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork, Floats
from isthmus.planners.search.cuts import TOLERANCE
from isthmus.planners.spanning import Spanning
from isthmus.plans import Certificate


def pooled_bound_s(network: FleetNetwork, blocks: Blocks, micro_batches: int) -> float:
    """min over S of compute(S) + links(S) + shared, in seconds; 0 if nothing fits.

    compute(S) = min over j <= S of (j + n - 1) * work / (j fastest speeds): with few micro-batches it is best to give
    the slower devices next to nothing.
    """
    work, fastest = float(blocks.work[-1]), float(network.speed.max())
    most = min(len(network.speed), blocks.count)
    sizes = np.arange(1, most + 1)
    balanced = work / np.cumsum(np.sort(network.speed)[::-1])[:most]
    links = LinkBounds(network, blocks)
    period = np.maximum(balanced, float(np.diff(blocks.work).max(initial=0.0)) / fastest)
    period = np.maximum(period, links.busiest())
    # With a period above the balanced one the fastest devices do more: only total work / speed bounds the fill.
    later = micro_batches - 1
    step = np.where(
        period > balanced, work / fastest + later * period, np.minimum.accumulate((sizes + later) * balanced)
    )
    step = step + links.sums()
    step[1:] = np.minimum(step[1:] + _sent_s(network, blocks), _kept_together_s(network, blocks, micro_batches))
    step[: fewest_stages(network, blocks) - 1] = np.inf
    return float(step.min(initial=np.inf)) if np.isfinite(step).any() else 0.0


def step_certificate(bound_s: float, step_s: float, question: str, *, exact: bool = False) -> Certificate | None:
    """What a lower bound on the step proves of a plan; None for a bound of 0, which proves nothing."""
    if bound_s <= 0:
        return None
    bound_s = min(bound_s, step_s)
    gap = step_s / bound_s - 1
    none = gap <= 10 * TOLERANCE
    return Certificate(lower_bound=bound_s, gap=0.0 if none else gap, question=question, exact=exact or none)


def fewest_stages(network: FleetNetwork, blocks: Blocks) -> int:
    """So many of the largest devices hold the model's state and one micro-batch."""
    need = sum(v.owned_bytes for v in blocks.variables) + float(blocks.saved[-1])
    return 1 + int(np.searchsorted(np.cumsum(np.sort(network.memory)[::-1]), need))


def _sent_s(network: FleetNetwork, blocks: Blocks) -> float:
    """Every shared parameter there and back once, over the best link."""
    if len(network.names) == 1:
        return 0.0
    latency = network.kind_latency + network.kind_latency.T
    byte_s = network.kind_byte_s + network.kind_byte_s.T
    return sum(float((latency + i.forward_bytes * byte_s).min()) for i in blocks.items if i.per_step)


def _kept_together_s(network: FleetNetwork, blocks: Blocks, micro_batches: int) -> float:
    """n times the least work between the first and last use of a shared parameter, on the fastest device."""
    spans = [blocks.work[i.uses[-1] + 1] - blocks.work[i.made_in] for i in blocks.items if i.per_step]
    return micro_batches * float(min(spans, default=np.inf)) / float(network.speed.max())


class LinkBounds:
    """What one micro-batch spends on links at least, by the number of stages."""

    def __init__(self, network: FleetNetwork, blocks: Blocks) -> None:
        self._most = min(len(network.names), blocks.count)
        if self._most == 1:
            return
        self._taken = np.sort(
            np.array([_taken(blocks, boundary) for boundary in range(1, blocks.count)], dtype=np.float64), axis=0
        ).T
        self._latency = Spanning(network, network.kind_latency)
        self._byte_s = Spanning(network, network.kind_byte_s)
        self._best_byte_s = float(network.kind_byte_s.min())

    def sums(self) -> Floats:
        """[stages - 1] seconds, both ways."""
        links = np.zeros(self._most)
        if self._most == 1:
            return links
        for sizes in self._taken:  # forward, backward: the fewest bytes first
            silent = int((sizes == 0).sum())  # stages that may receive nothing
            least = np.concatenate([[0.0], np.cumsum(sizes[: self._most - 1])]) * self._best_byte_s
            heard = float(sizes[min(silent, len(sizes) - 1)])
            links += self._latency.sums(1 + silent)[: self._most]
            links += np.maximum(least, heard * self._byte_s.sums(1 + silent)[: self._most])
        return links

    def busiest(self) -> Floats:
        """[stages - 1] seconds per micro-batch on the link that is longest occupied."""
        if self._most == 1:
            return np.zeros(1)
        return float(self._taken[:, 0].max()) * self._byte_s.largest()[: self._most]


def _taken(blocks: Blocks, boundary: int) -> tuple[int, int]:
    """Bytes that a stage starting here receives and returns at least: what its first block takes."""
    items = [blocks.items[number] for number, use in blocks.live[boundary] if use == boundary]
    values = [item for item in items if not item.per_step]
    return sum(i.forward_bytes for i in values), sum(i.backward_bytes for i in values)
