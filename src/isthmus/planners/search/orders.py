"""Good orders of many devices, by a score that needs no cut: work balanced perfectly, one typical message per link.

Tours start at the nearest neighbour and are improved by 2-opt reversals and by moving single devices; then devices
are dropped one by one, the most costly first, so that every size of pipeline has its candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.cost import Problem
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork, Floats
from isthmus.planners.observer import looked_at
from isthmus.planners.search.local_search import first_improvement, nearest_tour

Order = tuple[int, ...]

MOST_STARTS = 4
MOST_POLISHED = 4
ROUNDING = 1e-12
"""Relative: a score that is less by no more is the same."""
MOST_SCORES = 12_000
"""Scores per improvement: bounds the time on large fleets, the same on every machine."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    speed: Floats
    memory: Floats
    pair_s: Floats
    """[i, j]: seconds of a typical message forward from i to j and back, latency included."""
    wire_s: Floats
    """[i, j]: how long it occupies the slower direction."""
    work: float
    fixed_bytes: float
    micro_batch_bytes: float
    """Of the whole model."""
    micro_batches: int

    def score(self, order: Sequence[int]) -> float:
        """Seconds per step if every device took work and memory in proportion to its speed."""
        fill_s, period_s = self.fill_and_period(order)
        return fill_s + (self.micro_batches - 1) * period_s

    def fill_and_period(self, order: Sequence[int]) -> tuple[float, float]:
        """Seconds of one micro-batch alone, and between micro-batches."""
        chain = np.asarray(order)
        speed = self.speed[chain]
        share = speed / speed.sum()
        stage_s = self.work / float(speed.sum())
        links = self.pair_s[chain[:-1], chain[1:]]
        fill_s = len(order) * stage_s + float(links.sum())
        round_trip_s = fill_s - np.cumsum(stage_s + np.concatenate([[0.0], links])) + stage_s
        held = (self.memory[chain] - share * self.fixed_bytes) / np.maximum(share * self.micro_batch_bytes, 1.0)
        # A device too small for one micro-batch may still do with less work than its share.
        throttle_s = round_trip_s / np.clip(held, 0.25, None) * (held < self.micro_batches)
        busy_s = max(stage_s, float(self.wire_s[chain[:-1], chain[1:]].max(initial=0.0)), float(throttle_s.max()))
        return fill_s, busy_s


def scorer_of(problem: Problem, network: FleetNetwork, blocks: Blocks) -> Scorer:
    """The typical message is the first quartile over the places of `blocks`: cuts go where little crosses."""
    sizes = [(0, 0, 0)] if blocks.count == 1 else []
    for boundary in range(1, blocks.count):
        crossing = [blocks.items[number] for number, _ in blocks.live[boundary]]
        values = [item for item in crossing if not item.per_step]
        there, back = sum(i.forward_bytes for i in values), sum(i.backward_bytes for i in values)
        sizes.append((there + back, there, back))
    _, forward, backward = sorted(sizes)[len(sizes) // 4]
    there, back = network.byte_s * forward, network.byte_s.T * backward
    return Scorer(
        speed=network.speed,
        memory=network.memory,
        pair_s=network.latency + network.latency.T + there + back,
        wire_s=np.maximum(there, back),
        work=float(blocks.work[-1]),
        fixed_bytes=float(sum(v.owned_bytes for v in blocks.variables)),
        micro_batch_bytes=float(blocks.saved[-1]),
        micro_batches=problem.micro_batches,
    )


def candidate_orders(scorer: Scorer, starts: Sequence[int]) -> list[Order]:
    """The best order of every size, best score first; the fleet's own order is among them."""
    found: dict[Order, float] = {}

    def offer(order: Order) -> None:
        found[order] = scorer.score(order)

    for start in starts[:MOST_STARTS]:
        order = improve(scorer, nearest_neighbour(scorer, start), MOST_SCORES)
        offer(order)
        for shorter in _thinned(scorer, order):
            offer(shorter)
    for order in sorted(found, key=lambda o: found[o])[:MOST_POLISHED]:
        offer(improve(scorer, order, MOST_SCORES))
    best: dict[int, Order] = {}
    for order in sorted(found, key=lambda o: (found[o], o)):
        best.setdefault(len(order), order)
    own = tuple(range(len(scorer.speed)))
    offer(own)
    return sorted({*best.values(), own}, key=lambda o: (found[o], o))


def nearest_neighbour(scorer: Scorer, start: int) -> Order:
    return tuple(nearest_tour(scorer.pair_s, start, range(len(scorer.speed))))


def improve(scorer: Scorer, order: Order, most_scores: int) -> Order:
    """First improvement over reversals and moves of one device, until none helps or the budget is spent."""

    def scored(now: tuple[Order, float]) -> Iterator[tuple[Order, float]]:
        return ((other, scorer.score(other)) for other in _neighbours(now[0]))

    start = order, scorer.score(order)
    return first_improvement(start, scored, lambda now: now[1], most=most_scores, tolerance=ROUNDING)[0]


def _neighbours(order: Order) -> Iterator[Order]:
    size = len(order)
    for i in range(size):
        for j in range(i + 1, size):
            yield order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
    for i in range(size):
        rest = order[:i] + order[i + 1 :]
        for j in range(size):
            if j != i:
                yield (*rest[:j], order[i], *rest[j:])


def _thinned(scorer: Scorer, order: Order) -> Iterator[Order]:
    """Ever shorter orders, each without the device whose loss scores best."""
    while len(order) > 1:
        looked_at(len(order))
        shorter = [order[:i] + order[i + 1 :] for i in range(len(order))]
        order = min(shorter, key=scorer.score)
        yield order
