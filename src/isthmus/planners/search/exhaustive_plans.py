"""The best of all plans of a small problem, and so its own proof.

For every set of disjoint groups of devices: every pipeline of each group, with every other's, and every split of the
micro-batches between them (`splits`). All pipelines of all groups are arrays; where they are too many, nothing is
settled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import reduce
from math import comb, perm
from typing import NamedTuple

import numpy as np

from isthmus.cost import PlanLayout, Problem, build_replicas
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import Ints, cut_table, every_cut
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Pipelines, Trials
from isthmus.planners.observer import looked_at, salvaged
from isthmus.planners.search.averaging import Averaging
from isthmus.planners.search.recomputing import every_choice
from isthmus.planners.search.splits import Soonest, soonest
from isthmus.planners.search.threshold_search import TOLERANCE
from isthmus.plans import Plan

MOST_DEVICES = 6
MOST_PIPELINES = 400_000
MOST_CHOICES = 2_000_000
"""Of one grouping, after those are dropped that even without averaging are no better than the best plan known."""
Group = frozenset[int]


class ExhaustiveResult(NamedTuple):
    """The best plan if it beats what was known, and the least step time of any plan."""

    plan: Plan | None
    step_s: float


class _PlanChoice(NamedTuple):
    found: Soonest
    groups: tuple[Group, ...]


class _TooManyPlans(Exception):
    pass


def exhaustive_plan(problem: Problem, network: FleetNetwork, blocks: Blocks, known_s: float) -> ExhaustiveResult | None:
    """What is best of all plans; None where they are too many to look at. `known_s` is the step of some plan, or
    infinite."""
    devices = len(network.names)
    if devices > MOST_DEVICES or pipeline_count(devices, blocks.count) > MOST_PIPELINES:
        return None
    search = _PlanSearch(problem, network, blocks, known_s)
    if known_s == float("inf"):
        search.best_s = search.longest_s()
    try:
        with salvaged(lambda: search.plan() if search.best else None):
            for groups in groupings(range(devices)):
                if 0 < len(groups) <= problem.most_replicas:
                    for ordered in itertools.permutations(groups):  # collectives depend on who is counted first
                        search.look(ordered)
    except _TooManyPlans:
        return None
    return ExhaustiveResult(search.plan() if search.best else None, search.best_s if search.best else known_s)


def pipeline_count(devices: int, blocks: int) -> int:
    """Orders of every subset times cuts."""
    return sum(perm(devices, k) * comb(blocks - 1, k - 1) for k in range(1, min(devices, blocks) + 1))


def _every_pipeline(problem: Problem, network: FleetNetwork, blocks: Blocks, known_s: float) -> dict[Group, Pipelines]:
    """By set of devices, the pipelines that fit and whose fill is below `known_s`."""
    found: dict[Group, Pipelines] = {}
    for stages in range(1, min(len(network.names), blocks.count) + 1):
        table = cut_table(blocks, every_cut(blocks, stages))
        for members in itertools.combinations(range(len(network.names)), stages):
            looked_at()
            orders = np.array(list(itertools.permutations(members)), dtype=np.int64)
            cuts, rows = np.divmod(np.arange(len(table.ends) * len(orders)), len(orders))
            trials = Trials(table, cuts, orders[rows])
            found[frozenset(members)] = every_choice(problem, network, trials, known_s)
    return found


def groupings(devices: Sequence[int]) -> Iterator[tuple[Group, ...]]:
    """Every way to put some of the devices into groups, in no order; devices may stay outside."""
    if not devices:
        yield ()
        return
    device, rest = devices[0], devices[1:]
    for groups in groupings(rest):
        yield groups
        yield (frozenset({device}), *groups)
        for k, group in enumerate(groups):
            yield (*groups[:k], group | {device}, *groups[k + 1 :])


class _PlanSearch:
    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, known_s: float) -> None:
        self.problem, self.network, self.blocks = problem, network, blocks
        self.best: _PlanChoice | None = None
        self.best_s = known_s
        self._pipelines = _every_pipeline(problem, network, blocks, known_s)
        self._averaging = Averaging(problem.fleet, network, blocks)
        self._gradient_bytes = sum(variable.gradient_bytes for variable in blocks.variables)

    def longest_s(self) -> float:
        """More than any plan takes: all micro-batches one after another, all averaging over the worst links."""
        fill_s = max((float(p.fill_s.max(initial=0.0)) for p in self._pipelines.values()), default=0.0)
        link_s = float(self.network.latency.max() + (1 + self._gradient_bytes) * self.network.byte_s.max())
        messages = 2 * len(self.network.names) ** 2 * (1 + self.blocks.count)
        return 2 * (self.problem.micro_batches * fill_s + messages * link_s) + 1e-9

    def look(self, groups: tuple[Group, ...]) -> None:
        """Keeps the best plan of these groups, if it is better than what is known."""
        looked_at()
        if not all(group in self._pipelines for group in groups):
            return
        pipelines = [self._pipelines[group] for group in groups]
        goal_s = self.best_s * (1 - TOLERANCE)
        rows = self._worth(pipelines, goal_s)
        if not len(rows):
            return
        sync_s = self._averaging.exact_s(self._holders(pipelines, rows))
        found = soonest(pipelines, rows, sync_s, self.problem.micro_batches, goal_s)
        if found is not None:
            self.best_s, self.best = found.step_s, _PlanChoice(found, groups)

    def _worth(self, pipelines: Sequence[Pipelines], goal_s: float) -> Ints:
        """[choices, replicas]: rows of pipelines that would end all micro-batches by the goal, averaging apart."""
        most = self.problem.micro_batches
        found: list[Ints] = []
        counts: list[Ints] = []
        for p in pipelines:
            every = np.arange(len(p.fill_s))
            count = p.counts(every, np.full(len(every), goal_s), most)
            found.append(np.flatnonzero(count > 0))
            counts.append(count[found[-1]])
        if np.prod([float(len(rows)) for rows in found]) > MOST_CHOICES:
            raise _TooManyPlans
        total = reduce(np.add.outer, counts)
        picked = np.nonzero(total >= most)
        return np.stack([rows[k] for rows, k in zip(found, picked, strict=True)], axis=1)

    def _holders(self, pipelines: Sequence[Pipelines], rows: Ints) -> Ints:
        """[choices, replicas, parts]: the device that owns the gradients of each part."""
        held = [
            np.take_along_axis(p.order[rows[:, r]], p.stage_of[rows[:, r]][:, self._averaging.parts], axis=1)
            for r, p in enumerate(pipelines)
        ]
        return np.stack(held, axis=1)

    def plan(self) -> Plan:
        assert self.best is not None, "asked for only where one was found"
        layouts: list[PlanLayout] = []
        found = self.best.found
        for group, row, share in zip(self.best.groups, found.rows, found.shares, strict=True):
            p = self._pipelines[group]
            order = tuple(self.network.names[d] for d in p.order[row])
            layouts.append(PlanLayout(order, tuple(self.blocks.boundaries(p.ends[row][1:-1])), share))
        return build_replicas(self.problem, layouts, planner="auto")
