"""Which devices, in which order, cut where: every order on small fleets, the best of a local search on large ones.

Good orders of many devices come from a score that needs no cut: work balanced perfectly over speeds v, one typical
message per link,

    score = S w / sum(v) + links + (n - 1) * max(w / sum(v), slowest link, what memory throttles)

Tours start at the nearest neighbour and are improved by 2-opt reversals and by moving single devices; then devices are
dropped one by one, the most costly first, so that every size of pipeline has its candidate. Beside these are the first
devices of the tour from each device, as many as each size takes; the sizes that score best exchange devices with those
left out. The best are cut exactly (`cuts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from isthmus.cost import Problem, build_plan, kernel
from isthmus.cost.blocks import Blocks, coarse
from isthmus.cost.kernel import Floats, Ints
from isthmus.cost.network import FleetNetwork
from isthmus.planners.observer import looked_at, salvaged
from isthmus.planners.search.cuts import Budget, ThresholdSearch
from isthmus.planners.search.local_search import nearest_tour
from isthmus.planners.search.relaxation import Path, Relaxation, StageTables
from isthmus.planners.search.routes import ANY, MOST_BEGINNINGS, Routes, all_orders, fixed_placement_of, one_order
from isthmus.plans import Plan

Order = tuple[int, ...]

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


MOST_EXHAUSTIVE = 6  # devices up to which every order of every subset is searched
MOST_EXACT_BLOCKS = 300  # blocks up to which that search sees every place to cut
COARSE_BLOCKS = 200
MOST_CELLS = 1_200_000  # entries of one stage table: some 25 tables of 8 bytes each
MOST_CANDIDATES = 16
PER_ORDER = Budget(probes=60, states=1_000)  # where orders are not searched exhaustively


class FoundOrder(NamedTuple):
    """Devices in order, operator positions of the cuts, and their objective."""

    devices: tuple[int, ...]
    boundaries: tuple[int, ...]
    step_s: float


class OrderSearch:
    """Searches one problem. `throttled` is that of `Relaxation`."""

    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, *, throttled: bool = False) -> None:
        self.problem = problem
        self.network = network
        self.blocks = blocks
        self.throttled = throttled
        self.fixed_placement = fixed_placement_of(problem, network)

    @property
    def exhaustive(self) -> bool:
        """Return whether every order and every place to cut is within the search."""
        return len(self.network.names) <= MOST_EXHAUSTIVE and self.blocks.count <= MOST_EXACT_BLOCKS

    def run(self) -> FoundOrder | None:
        """The best pipeline found, or None where none fits."""
        if self.exhaustive:
            return self._found(self.blocks, self._every_order(self.blocks))
        rough = coarse(self.blocks, COARSE_BLOCKS)
        few = len(self.network.names) <= MOST_EXHAUSTIVE
        guess = self._every_order(rough) if few else self._best_candidate(rough)
        if guess is None or guess.best is None:
            return None
        with salvaged(lambda: self._built(rough, guess)):
            return self._refine(rough, guess.best.path, guess.upper_s)

    def _found(self, blocks: Blocks, search: ThresholdSearch) -> FoundOrder | None:
        if search.best is None:
            return None
        path = search.best.path
        return FoundOrder(path.devices, tuple(blocks.boundaries(path.cut)), search.step_s)

    def _run(self, blocks: Blocks, search: ThresholdSearch) -> None:
        with salvaged(lambda: self._built(blocks, search)):
            search.run()

    def _built(self, blocks: Blocks, search: ThresholdSearch | None) -> Plan | None:
        found = self._found(blocks, search) if search is not None else None
        if found is None:
            return None
        order = [self.network.names[d] for d in found.devices]
        return build_plan(self.problem, order, found.boundaries, planner="chain")

    def _every_order(self, blocks: Blocks) -> ThresholdSearch:
        tables = StageTables(blocks)
        free = self._relaxation(tables, all_orders(self.network, self.fixed_placement, memory_binds=False))
        held = free.in_flight(ANY)
        if all(free.fits(d, held, 0, tables.count).all() for d in range(len(self.network.names))):
            relaxation = free
        else:
            relaxation = self._relaxation(tables, all_orders(self.network, self.fixed_placement, memory_binds=True))
        search = ThresholdSearch(relaxation, self.problem.micro_batches)
        self._run(blocks, search)
        return search

    def _relaxation(self, tables: StageTables, routes: Routes) -> Relaxation:
        return Relaxation(self.problem, self.network, tables, routes, throttled=self.throttled)

    def _best_candidate(self, rough: Blocks) -> ThresholdSearch | None:
        """The best order of a few, each cut exactly at the rough places."""
        tables = StageTables(rough)
        scorer = scorer_of(self.problem, self.network, rough)
        best: ThresholdSearch | None = None
        tried = 0
        orders = candidate_orders(scorer, self._starts())
        pinned = [(holder,) for holder in self._holders()]  # alone: no order of several may be worth its links
        pinned += [order for free in orders for order in self.fixed_placement.applied(free)]
        for order in dict.fromkeys(pinned):
            if len(order) > rough.count or tried >= MOST_CANDIDATES:
                continue
            routes = one_order(order)
            search = ThresholdSearch(
                self._relaxation(tables, routes),
                self.problem.micro_batches,
                best.step_s if best else float("inf"),
                PER_ORDER,
            )
            with salvaged(partial(self._built, rough, best)):
                self._run(rough, search)
            tried += search.probes > 1  # one probe settles what cannot win or does not fit
            if search.best is not None and (best is None or search.step_s < best.step_s):
                best = search
        return best

    def _holders(self) -> tuple[int, ...]:
        """The first data holders, where the data are not everywhere."""
        return self.fixed_placement.holders[:MOST_BEGINNINGS] if self.problem.constraints.data_holders else ()

    def _starts(self) -> list[int]:
        """The first data holders, then one device of each region: tours that begin in one region hardly differ."""
        seen: dict[str, int] = {self.problem.fleet.devices[holder].region: holder for holder in self._holders()}
        for number, device in enumerate(self.problem.fleet.devices):
            seen.setdefault(device.region, number)
        return list(seen.values())

    def _refine(self, rough: Blocks, path: Path, upper_s: float) -> FoundOrder:
        """The same order cut at any place, as far as the tables hold the stages."""
        known = FoundOrder(path.devices, tuple(rough.boundaries(path.cut)), upper_s)
        blocks = self.blocks
        width = self._width(blocks, known, upper_s)
        if blocks.count * width > MOST_CELLS:
            blocks = coarse(blocks, int(MOST_CELLS**0.5))
            width = blocks.count
        relaxation = self._relaxation(StageTables(blocks, width), one_order(path.devices))
        search = ThresholdSearch(relaxation, self.problem.micro_batches, upper_s, PER_ORDER)
        self._run(blocks, search)
        return self._found(blocks, search) or known

    def _width(self, blocks: Blocks, found: FoundOrder, upper_s: float) -> int:
        """Most blocks in a stage of any pipeline that beats `upper_s`, and of the one found."""
        speed = self.network.speed[list(found.devices)]
        ends = np.searchsorted(blocks.places, [*found.boundaries, blocks.places[-1]])
        width = int(np.diff(ends, prepend=0).max())
        gain = self.problem.micro_batches - 1
        if not gain:
            return blocks.count
        period_s = (upper_s - float(blocks.work[-1] / speed.max())) / gain
        reach = np.searchsorted(blocks.work, blocks.work + period_s * speed.max(), "right")
        return min(blocks.count, max(width, int((reach - np.arange(blocks.count + 1)).max())))
