"""Every plan of a small problem, and so its own proof: `exhaustive_plan` of any number of replicas, and
`exhaustive_pipeline` of one, with any objective and any terms.

For every set of disjoint groups of devices: every pipeline of each group, with every other's, and every split of the
micro-batches between them (`descent.soonest`). All pipelines of all groups are rows of the closed form (`cost.kernel`);
where they are too many, nothing is settled.

Where the closed form of arrays is a lower bound only (two stages share a device's memory, messages are packed by the
plan, copies of the first stage), pipelines are built one by one in the order of their bounds:

    the first bound that is no better than the best plan built ends the search
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import reduce
from math import comb, perm

import numpy as np

from isthmus.cost import (
    PlanLayout,
    Problem,
    broken_constraint,
    build_plan,
    build_replicas,
    kernel,
    preference,
)
from isthmus.cost.averaging import Averaging
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table, every_cut
from isthmus.cost.kernel import Floats, Ints
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Pipelines, Trials, rate_of, timed
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep, looked_at, salvaged
from isthmus.planners.search.descent import Split, every_choice, soonest
from isthmus.planners.search.fixed_placement import fixed_placement_of
from isthmus.planners.search.local_search import TOLERANCE
from isthmus.plans import Plan

MOST_DEVICES = 6
MOST_PIPELINES = 400_000
MOST_CHOICES = 2_000_000
"""Choices of one grouping, without those that even without averaging are no better than the best plan known."""
MOST_TOGETHER = 100_000  # choices that are looked at together
MOST_CANDIDATES = 150_000  # choices that compute in less than the best time known
MOST_BUILT = 3_000
Group = frozenset[int]


class _TooManyPlans(Exception):
    pass


def settles(problem: Problem) -> bool:
    """Return whether every plan may be tried: time alone counts, nothing has a limit, the data are everywhere, and
    gradients are summed in every step."""
    constraints = problem.constraints
    free = not constraints.limited and not constraints.data_holders and problem.schedule != "delayed"
    return constraints.objective == "time" and free and problem.sync.mode == "every-step"


def exhaustive_plan(problem: Problem, network: FleetNetwork, blocks: Blocks, known_s: float) -> list[Plan] | None:
    """The best of all plans, if it beats `known_s`, the step of some plan or infinite; None where they are too many."""
    devices = len(network.names)
    if devices > MOST_DEVICES or pipeline_count(devices, blocks.count) > MOST_PIPELINES:
        return None
    search = _PlanSearch(problem, network, blocks, known_s)
    if known_s == float("inf"):
        search.best_s = search.longest_s()
    try:
        with salvaged(lambda: search.plan() if search.best else None):
            for groups in every_grouping(range(devices)):
                if 0 < len(groups) <= problem.most_replicas:
                    for ordered in itertools.permutations(groups):  # collectives depend on who is counted first
                        search.look(ordered)
    except _TooManyPlans:
        return None
    return [search.plan()] if search.best else []


def exhaustive_pipeline(
    problem: Problem, network: FleetNetwork, blocks: Blocks, known: float, *, judged: Problem | None = None
) -> Plan | None:
    """The best pipeline; None where none beats `known`, or there are too many to try.

    Plans are those of `judged`, by default the problem itself: no pipeline of it does better than in the problem, its
    round trips apart.
    """
    judged = judged or problem
    bounds: list[Floats] = []
    rows: list[tuple[int, int]] = []
    pipelines: list[Pipelines] = []
    try:
        for p in _promising(problem, network, blocks, known, throttled=judged is problem):
            bounds.append(_undercut(problem, p, throttled=judged is problem))
            rows += [(len(pipelines), k) for k in range(len(p.fill_s))]
            pipelines.append(p)
    except _TooManyPlans:
        return None
    bound = np.concatenate([np.zeros(0), *bounds])
    best, least, tried = None, known, set[tuple[tuple[int, ...], tuple[int, ...]]]()
    for k in np.argsort(bound, kind="stable").tolist():
        if bound[k] >= least * (1 - TOLERANCE) or len(tried) == MOST_BUILT:
            break
        looked_at()
        p, row = pipelines[rows[k][0]], rows[k][1]
        candidate = tuple(p.order[row].tolist()), tuple(p.ends[row][1:-1].tolist())
        if candidate in tried:  # with other stages that recompute
            continue
        tried.add(candidate)
        order, boundaries = [network.names[d] for d in candidate[0]], blocks.boundaries(candidate[1])
        if broken_constraint(judged, order, boundaries) is not None:
            continue
        with contextlib.suppress(FleetTooSmall):
            plan = build_plan(judged, order, boundaries, planner="chain")
            if preference(judged, plan)[0] < least:
                best, least = keep(plan), preference(judged, plan)[0]
    return best


def _undercut(problem: Problem, p: Pipelines, *, throttled: bool) -> Floats:
    """[pipelines] seconds or money that no plan of these undercuts: what shared parameters cost to send is left out."""
    count = problem.micro_batches
    step_s = p.step_s(count) if throttled else p.at_least_s(count)
    if problem.constraints.objective == "time":
        return step_s
    rate = np.where(np.isfinite(step_s), p.rate, 1.0)  # what does not fit costs no 0
    return kernel.price(step_s, rate, count * p.sent)


def _promising(
    problem: Problem, network: FleetNetwork, blocks: Blocks, known: float, *, throttled: bool
) -> Iterator[Pipelines]:
    """Pipelines that keep to the terms and whose stages fit and compute in less than what is known."""
    fixed, devices = fixed_placement_of(problem, network), len(network.names)
    priced = problem.constraints.objective == "cost"
    left = MOST_CANDIDATES
    if devices > MOST_DEVICES or pipeline_count(devices, blocks.count) > MOST_PIPELINES:
        raise _TooManyPlans
    for count in range(1, min(devices + fixed.labels_stay, blocks.count) + 1):
        ends = every_cut(blocks, count)
        ends = ends[(ends[:, -2] <= blocks.last_start) | (count == 1)]
        table = cut_table(blocks, ends)
        orders = np.array(list(fixed.pipelines(range(devices), count)), dtype=np.int64).reshape(-1, count)
        for some in np.array_split(orders, 1 + len(orders) * len(ends) // MOST_TOGETHER):
            looked_at(len(some))
            cuts, row = np.divmod(np.arange(len(ends) * len(some)), max(1, len(some)))
            trials = Trials(table, cuts, some[row])
            second = rate_of(network, trials.order) if priced else np.ones(len(cuts))
            known_s = np.divide(known, second, out=np.full(len(cuts), np.inf), where=second > 0)
            trials = trials[_computed_in(problem, network, trials, known_s)]
            left -= len(trials.cuts)
            if left < 0:
                raise _TooManyPlans
            if len(trials.cuts):
                fast_s = np.inf if priced else known
                if throttled:
                    yield every_choice(problem, network, trials, fast_s, problem.micro_batches)
                else:
                    yield timed(problem, network, trials)


def _computed_in(problem: Problem, network: FleetNetwork, trials: Trials, known_s: Floats) -> Ints:
    """Rows whose stages hold one micro-batch, and whose closed form without links is below `known_s`."""
    table, cuts, speed = trials.table, trials.cuts, network.speed[trials.order]
    compute_s = (table.forward_work[cuts] + table.backward_work[cuts]) / speed
    alone_s = compute_s.max(axis=1) if problem.schedule == "delayed" else compute_s.sum(axis=1)
    least_s = kernel.step_s(alone_s, compute_s.max(axis=1), problem.micro_batches)
    need = table.fixed_bytes[cuts] + table.saved_bytes[cuts] + table.received_bytes[cuts]
    fits = (need <= network.memory[trials.order]).all(axis=1)
    return np.flatnonzero(fits & (least_s < known_s))


def pipeline_count(devices: int, blocks: int) -> int:
    """Orders of every subset times cuts."""
    return sum(perm(devices, k) * comb(blocks - 1, k - 1) for k in range(1, min(devices, blocks) + 1))


def _every_pipeline(problem: Problem, network: FleetNetwork, blocks: Blocks, known_s: float) -> dict[Group, Pipelines]:
    """Return the pipelines of each set of devices that fit and whose fill is below `known_s`."""
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


def every_grouping(devices: Sequence[int]) -> Iterator[tuple[Group, ...]]:
    """Every way to put some of the devices into groups, in no order; devices may stay outside."""
    if not devices:
        yield ()
        return
    device, rest = devices[0], devices[1:]
    for groups in every_grouping(rest):
        yield groups
        yield (frozenset({device}), *groups)
        for k, group in enumerate(groups):
            yield (*groups[:k], group | {device}, *groups[k + 1 :])


class _PlanSearch:
    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, known_s: float) -> None:
        self.problem, self.network, self.blocks = problem, network, blocks
        self.best: tuple[Split, tuple[Group, ...]] | None = None
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
        sync_s = self._averaging.exact_s(self._averaging.holders(pipelines, rows), looked_at)
        found = soonest(pipelines, rows, sync_s, self.problem.micro_batches, goal_s)
        if found is not None:
            self.best_s, self.best = found.value, (found, groups)

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

    def plan(self) -> Plan:
        assert self.best is not None, "asked for only where one was found"
        layouts: list[PlanLayout] = []
        found, groups = self.best
        for group, row, share in zip(groups, found.rows, found.shares, strict=True):
            p = self._pipelines[group]
            order = tuple(self.network.names[d] for d in p.order[row])
            layouts.append(PlanLayout(order, tuple(self.blocks.boundaries(p.ends[row][1:-1])), share))
        return build_replicas(self.problem, layouts, planner="auto")
