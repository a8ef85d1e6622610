"""Which devices, in which order, cut where: every order on small fleets, the best of a local search on large ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from isthmus.cost import Problem, build_plan
from isthmus.cost.blocks import Blocks, coarse
from isthmus.cost.network import FleetNetwork
from isthmus.planners.observer import salvaged
from isthmus.planners.relaxation import Path, Relaxation
from isthmus.planners.search.fixed_placement import MOST_BEGINNINGS, fixed_placement_of
from isthmus.planners.search.orders import candidate_orders, scorer_of
from isthmus.planners.search.routes import ANY, Routes, all_orders, one_order
from isthmus.planners.search.stage_tables import StageTables
from isthmus.planners.search.threshold_search import Budget, ThresholdSearch
from isthmus.plans import Plan

MOST_EXHAUSTIVE = 6
"""Devices up to which every order of every subset is searched."""
MOST_EXACT_BLOCKS = 300
"""Blocks up to which that search sees every place to cut."""
COARSE_BLOCKS = 200
MOST_CELLS = 1_200_000
"""Entries of one stage table: some 25 tables of 8 bytes each."""
MOST_CANDIDATES = 12
PER_ORDER = Budget(probes=60, states=1_000)
"""Where orders are not searched exhaustively."""


@dataclass(frozen=True)
class FoundOrder:
    """Devices in order, operator positions of the cuts, their objective, and the bound that the search proved."""

    devices: tuple[int, ...]
    boundaries: tuple[int, ...]
    step_s: float
    bound_s: float


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
        """Whether every order and every place to cut is within the search."""
        return len(self.network.names) <= MOST_EXHAUSTIVE and self.blocks.count <= MOST_EXACT_BLOCKS

    def run(self) -> FoundOrder | None:
        """The best pipeline found, or None where none fits."""
        if self.exhaustive:
            return self._found(self.blocks, *self._every_order(self.blocks))
        rough = coarse(self.blocks, COARSE_BLOCKS)
        few = len(self.network.names) <= MOST_EXHAUSTIVE
        guess = self._every_order(rough)[0] if few else self._best_candidate(rough)
        if guess is None or guess.best is None:
            return None
        with salvaged(lambda: self._built(rough, guess)):
            return self._refine(rough, guess.best.path, guess.upper_s)

    def _found(self, blocks: Blocks, search: ThresholdSearch, bound_s: float) -> FoundOrder | None:
        if search.best is None:
            return None
        path = search.best.path
        return FoundOrder(path.devices, tuple(blocks.boundaries(path.cut)), search.step_s, bound_s)

    def _run(self, blocks: Blocks, search: ThresholdSearch) -> float:
        with salvaged(lambda: self._built(blocks, search)):
            return search.run()

    def _built(self, blocks: Blocks, search: ThresholdSearch | None) -> Plan | None:
        found = self._found(blocks, search, 0.0) if search is not None else None
        if found is None:
            return None
        order = [self.network.names[d] for d in found.devices]
        return build_plan(self.problem, order, found.boundaries, planner="chain")

    def _every_order(self, blocks: Blocks) -> tuple[ThresholdSearch, float]:
        tables = StageTables(blocks)
        free = self._relaxation(tables, all_orders(self.network, self.fixed_placement, memory_binds=False))
        held = free.in_flight(ANY)
        if all(free.fits(d, held, 0, tables.count).all() for d in range(len(self.network.names))):
            relaxation = free
        else:
            relaxation = self._relaxation(tables, all_orders(self.network, self.fixed_placement, memory_binds=True))
        search = ThresholdSearch(relaxation, self.problem.micro_batches)
        return search, self._run(blocks, search)

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
        known = FoundOrder(path.devices, tuple(rough.boundaries(path.cut)), upper_s, 0.0)
        blocks = self.blocks
        width = self._width(blocks, known, upper_s)
        if blocks.count * width > MOST_CELLS:
            blocks = coarse(blocks, int(MOST_CELLS**0.5))
            width = blocks.count
        relaxation = self._relaxation(StageTables(blocks, width), one_order(path.devices))
        search = ThresholdSearch(relaxation, self.problem.micro_batches, upper_s, PER_ORDER)
        self._run(blocks, search)
        return self._found(blocks, search, 0.0) or known

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
