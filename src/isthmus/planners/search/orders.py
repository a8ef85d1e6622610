"""Which devices, in which order: every order on small fleets, the best of a local search on large ones.

Good orders of many devices come from a score that needs no cut: work balanced perfectly over speeds v, one typical
message per link,

    score = S w / sum(v) + links + (n - 1) * max(w / sum(v), slowest link, what memory throttles)

Tours start at the nearest neighbour and are improved by 2-opt reversals and by moving single devices; then devices are
dropped one by one, the most costly first, so that every size of pipeline has its candidate. Beside these are the first
devices of the tour from each device, as many as each size takes; the sizes that score best exchange devices with those
left out. The best are cut (`cuts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.cost import Problem, kernel
from isthmus.cost.blocks import Blocks
from isthmus.cost.kernel import Floats, Ints
from isthmus.cost.network import FleetNetwork
from isthmus.planners.observer import looked_at
from isthmus.planners.search.fixed_placement import MOST_BEGINNINGS, Order, fixed_placement_of
from isthmus.planners.search.local_search import nearest_tour

MOST_STARTS = 4
MOST_POLISHED = 4
ROUNDING = 1e-12  # relative: a score that is less by no more is the same
MOST_SCORES = 12_000  # scores per improvement: bounds the time on large fleets, the same on every machine


@dataclass(frozen=True, kw_only=True)
class Scorer:
    speed: Floats
    memory: Floats
    pair_s: Floats  # [i, j]: seconds of a typical message forward from i to j and back, latency included
    wire_s: Floats  # [i, j]: how long it occupies the slower direction
    work: float
    fixed_bytes: float
    micro_batch_bytes: float  # bytes of the whole model
    micro_batches: int

    def score(self, order: Sequence[int]) -> float:
        """Seconds per step if every device took work and memory in proportion to its speed."""
        return float(self.scores(np.array([order]))[0])

    def scores(self, orders: Ints) -> Floats:
        """[orders]: the same of many, [orders, devices]."""
        return kernel.step_s(*self._fills_and_periods(orders), self.micro_batches)

    def fill_and_period(self, order: Sequence[int]) -> tuple[float, float]:
        """Seconds of one micro-batch alone, and between micro-batches."""
        fill_s, period_s = self._fills_and_periods(np.array([order]))
        return float(fill_s[0]), float(period_s[0])

    def _fills_and_periods(self, orders: Ints) -> tuple[Floats, Floats]:
        speed = self.speed[orders]
        total = speed.sum(axis=1, keepdims=True)
        share, stage_s = speed / total, self.work / total
        links = self.pair_s[orders[:, :-1], orders[:, 1:]]
        fill_s = orders.shape[1] * stage_s + links.sum(axis=1, keepdims=True)
        way_s = stage_s + np.pad(links, ((0, 0), (1, 0)))
        round_trip_s = fill_s - np.cumsum(way_s, axis=1) + stage_s
        held = (self.memory[orders] - share * self.fixed_bytes) / np.maximum(share * self.micro_batch_bytes, 1.0)
        # A device too small for one micro-batch may still do with less work than its share.
        throttle_s = round_trip_s / np.maximum(held, 0.25) * (held < self.micro_batches)
        wire_s = self.wire_s[orders[:, :-1], orders[:, 1:]].max(axis=1, initial=0.0)
        return fill_s[:, 0], np.maximum(np.maximum(stage_s[:, 0], wire_s), throttle_s.max(axis=1))


def scorer_of(problem: Problem, network: FleetNetwork, blocks: Blocks) -> Scorer:
    """The typical message is the first quartile over the places of `blocks`: cuts go where little crosses."""
    sizes = [(0, 0, 0)] if blocks.count == 1 else []
    for boundary in range(1, blocks.count):
        values = [item for item in blocks.crossing(boundary) if not item.per_step]
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
    """The best orders of every size, one or two, best score first; the fleet's own order is among them."""
    found: dict[Order, float] = {}

    def offer(order: Order) -> None:
        found[order] = scorer.score(order)

    # score = S w / sum(v) + links + (n - 1) * max(w / sum(v), slowest link, what memory throttles)
    for start in starts[:MOST_STARTS]:
        order = improve(scorer, nearest_neighbour(scorer, start), MOST_SCORES)
        offer(order)
        for shorter in _thinned(scorer, order):
            offer(shorter)
    for order in sorted(found, key=lambda o: found[o])[:MOST_POLISHED]:
        offer(improve(scorer, order, MOST_SCORES))
    thinned, own = _best_of_sizes(found), tuple(range(len(scorer.speed)))
    # Devices that are near one another may all be dropped above: also the beginning of the tour from each.
    tours = np.array([nearest_neighbour(scorer, start) for start in own])
    for size in own[1:]:
        found |= zip(map(tuple, tours[:, :size].tolist()), scorer.scores(tours[:, :size]).tolist(), strict=True)
    for order in _best_of_sizes(found)[:MOST_POLISHED]:
        offer(improve(scorer, order, MOST_SCORES, own))
    best = _best_of_sizes(found)
    offer(own)
    return sorted({*thinned, *best, own}, key=lambda o: (found[o], o))


def _best_of_sizes(found: Mapping[Order, float]) -> list[Order]:
    best: dict[int, Order] = {}
    for order in sorted(found, key=lambda o: (found[o], o)):
        best.setdefault(len(order), order)
    return list(best.values())


def nearest_neighbour(scorer: Scorer, start: int) -> Order:
    return tuple(nearest_tour(scorer.pair_s, start, range(len(scorer.speed))))


def improve(scorer: Scorer, order: Order, most_scores: int, devices: Sequence[int] = ()) -> Order:
    """First improvement over exchanges of one device for another of `devices`, reversals and moves of one device, until
    none helps or the budget is spent."""
    now, now_s, improved = np.array(order), scorer.score(order), True
    while improved:
        improved = False
        for others in _neighbours(now, np.setdiff1d(np.array(devices, dtype=np.int64), now)):
            others_s = scorer.scores(others[: max(most_scores, 0)])
            better = np.flatnonzero(others_s < now_s * (1 - ROUNDING))
            looked = int(better[0]) + 1 if len(better) else len(others)
            looked_at(looked)
            most_scores -= looked
            if len(better):
                now, now_s, improved = others[better[0]], float(others_s[better[0]]), True
                break
            if most_scores <= 0:
                break
    return tuple(now.tolist())


def _neighbours(order: Ints, idle: Ints) -> Iterator[Ints]:
    """Yield orders like it, [orders, devices], a place of it at a time."""
    size, places = len(order), np.arange(len(order))
    for i in places if len(idle) else ():
        others = np.tile(order, (len(idle), 1))
        others[:, i] = idle
        yield others
    for i in places[:-1]:
        j = places[i + 1 :, None]
        yield order[np.where((places >= i) & (places <= j), i + j - places, places)]
    for i in places if size > 1 else ():
        j = np.delete(places, i)[:, None]
        later, earlier = (places >= i) & (places < j), (places > j) & (places <= i)
        yield order[np.where(places == j, i, places + later - earlier)]


def _thinned(scorer: Scorer, order: Order) -> Iterator[Order]:
    """Ever shorter orders, each without the device whose loss scores best."""
    now = np.array(order)
    while len(now) > 1:
        looked_at(len(now))
        shorter = np.array([np.delete(now, i) for i in range(len(now))])
        now = shorter[scorer.scores(shorter).argmin()]
        yield tuple(now.tolist())


MOST_EVERY = 6  # devices up to which every order of every subset is scored
MOST_CUT, MOST_CUT_SMALL = 24, 60  # orders that are cut, of a large fleet and of a small one


def promising_orders(problem: Problem, network: FleetNetwork, blocks: Blocks) -> list[Order]:
    """The orders that keep to the terms and are worth cutting, by the score."""
    scorer, fixed = scorer_of(problem, network, blocks), fixed_placement_of(problem, network)
    devices = range(len(network.names))
    if len(devices) <= MOST_EVERY:
        scores: dict[Order, float] = {}
        for size in range(1, len(devices) + 2):
            orders = list(fixed.pipelines(devices, size))
            if orders:
                scores |= zip(orders, scorer.scores(np.array(orders)).tolist(), strict=True)
        by_score = sorted(scores, key=lambda order: scores[order])
        return list(dict.fromkeys([*_best_of_sizes(scores), *by_score]))[:MOST_CUT_SMALL]
    holders = fixed.holders[:MOST_BEGINNINGS] if problem.constraints.data_holders else ()
    # The first data holders, then one device of each region: tours that begin in one region hardly differ.
    seen: dict[str, int] = {problem.fleet.devices[holder].region: holder for holder in holders}
    for number, device in enumerate(problem.fleet.devices):
        seen.setdefault(device.region, number)
    alone = [(holder,) for holder in holders]  # no order of several may be worth its links
    found = (order for free in candidate_orders(scorer, list(seen.values())) for order in fixed.applied(free))
    return list(dict.fromkeys([*alone, *found]))[:MOST_CUT]
