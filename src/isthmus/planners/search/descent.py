"""Local search over whole plans of one replica or more, many neighbours at a time.

Replicas that were cut each for itself can gain from each other: cut alike they average with fewer partners, and a
device whose link averages quickly may be worth a stage although it only slows its pipeline down. All neighbours of one
kind are arrays (`pipelines`); the best of them is taken if it is better than the plan at hand, with the micro-batches
split anew (`splits`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost import PlanLayout, Problem
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Pipelines, Trials
from isthmus.planners.observer import stopped
from isthmus.planners.search.averaging import Averaging
from isthmus.planners.search.recomputing import likely_choice
from isthmus.planners.search.splits import soonest
from isthmus.planners.search.threshold_search import TOLERANCE

MOST_UNUSED = 24
"""Devices outside the plan that are tried in it: the fastest."""
MOST_EXCHANGING = 6
"""Replicas up to which all exchange devices with all; beyond, each with the next one."""


class Stages(NamedTuple):
    """One replica: devices by number, and block boundaries, 0 and the end among them."""

    order: tuple[int, ...]
    ends: tuple[int, ...]


Replicas = tuple[Stages, ...]
Change = Mapping[int, Sequence[Stages]]
"""By replica, what it becomes: neighbour k changes all of them to their k-th. Equally many stages in each."""


class Descent:
    """One problem. `most` bounds the neighbours looked at, and so the time, the same on every machine."""

    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, most: int) -> None:
        self.problem, self.network, self.blocks, self.left = problem, network, blocks, most
        self._averaging = Averaging(problem.fleet, network, blocks)
        self._kept: dict[tuple[Stages, int], Pipelines] = {}

    def run(self, layouts: Sequence[PlanLayout], step_s: float) -> list[PlanLayout] | None:
        """Better layouts than these, which take `step_s`; None where none was found. Cuts are places of `blocks`."""
        number = {name: d for d, name in enumerate(self.network.names)}
        place = {position: block for block, position in enumerate(self.blocks.places)}
        now: Replicas = tuple(
            Stages(
                tuple(number[name] for name in layout.order),
                (0, *(place[b] for b in layout.boundaries), self.blocks.count),
            )
            for layout in layouts
        )
        shares: tuple[int, ...] | None = None
        quiet = 0
        while not quiet and self.left > 0:
            quiet = 1
            for change in self._changes(now):
                if stopped(len(next(iter(change.values())))):
                    break
                found = self._best(now, change, step_s * (1 - TOLERANCE))
                if found is not None:
                    now, shares, step_s, quiet = *found, 0
                    break
        if shares is None:
            return None
        names = self.network.names
        return [
            PlanLayout(tuple(names[d] for d in r.order), tuple(self.blocks.boundaries(r.ends[1:-1])), share)
            for r, share in zip(now, shares, strict=True)
        ]

    def _best(self, now: Replicas, change: Change, goal_s: float) -> tuple[Replicas, tuple[int, ...], float] | None:
        """The best of the neighbours, if it is below `goal_s`: with its split, and its step in seconds."""
        count = len(next(iter(change.values())))
        self.left -= count
        share = -(-self.problem.micro_batches // len(now))
        pipelines = [
            self._timed(change[r], share) if r in change else self._as_it_is(stages, share)
            for r, stages in enumerate(now)
        ]
        rows = np.stack(
            [np.arange(count) if r in change else np.zeros(count, dtype=np.int64) for r in range(len(now))], axis=1
        )
        fits = np.all([p.held[rows[:, r]].min(axis=1) >= 1 for r, p in enumerate(pipelines)], axis=0)
        rows = rows[fits]
        if not len(rows):
            return None
        holders = np.stack(
            [
                np.take_along_axis(p.order[rows[:, r]], p.stage_of[rows[:, r]][:, self._averaging.parts], axis=1)
                for r, p in enumerate(pipelines)
            ],
            axis=1,
        )
        sync_s = self._averaging.nearly_s(holders)
        found = soonest(pipelines, rows, sync_s, self.problem.micro_batches, goal_s)
        if found is None:
            return None
        k = max(found.rows[r] for r in change)
        return tuple(change[r][k] if r in change else s for r, s in enumerate(now)), found.shares, found.step_s

    def _as_it_is(self, stages: Stages, share: int) -> Pipelines:
        if (stages, share) not in self._kept:
            self._kept[stages, share] = self._timed((stages,), share)
        return self._kept[stages, share]

    def _timed(self, several: Sequence[Stages], share: int) -> Pipelines:
        ends, cuts = np.unique(np.array([s.ends for s in several]), axis=0, return_inverse=True)
        order = np.array([s.order for s in several])
        trials = Trials(cut_table(self.blocks, ends), cuts.reshape(-1), order)
        return likely_choice(self.problem, self.network, trials, share)

    def _changes(self, now: Replicas) -> Iterator[Change]:
        used = {d for stages in now for d in stages.order}
        by_speed = sorted(set(range(len(self.network.names))) - used, key=lambda d: -float(self.network.speed[d]))
        unused = by_speed[:MOST_UNUSED]
        for r, stages in enumerate(now):
            alike = [s.ends for s in now if len(s.ends) == len(stages.ends) and s.ends != stages.ends]
            for several in (
                [Stages(stages.order, ends) for ends in dict.fromkeys(alike)] + list(_cuts(stages)),
                list(_orders(stages, unused)),
                list(_longer(stages, unused)),
                list(_shorter(stages)),
            ):
                if several:
                    yield {r: several}
        for r, s in itertools.combinations(range(len(now)), 2):
            if len(now) <= MOST_EXCHANGING or s == r + 1:
                first, second = zip(*_exchanged(now[r], now[s]), strict=True)
                yield {r: first, s: second}
                for giver, taker in ((r, s), (s, r)):
                    yield from _moved(now, giver, taker)


def _cuts(stages: Stages) -> Iterator[Stages]:
    """One cut moves by one place, or by twice as many, and so on."""
    for k in range(1, len(stages.ends) - 1):
        for sign in (-1, 1):
            by = 1
            while stages.ends[k - 1] < stages.ends[k] + sign * by < stages.ends[k + 1]:
                yield Stages(stages.order, (*stages.ends[:k], stages.ends[k] + sign * by, *stages.ends[k + 1 :]))
                by *= 2


def _orders(stages: Stages, unused: Sequence[int]) -> Iterator[Stages]:
    """Two devices swap, or one makes room for an unused one."""
    for i, j in itertools.combinations(range(len(stages.order)), 2):
        order = list(stages.order)
        order[i], order[j] = order[j], order[i]
        yield stages._replace(order=tuple(order))
    for i, device in itertools.product(range(len(stages.order)), unused):
        yield stages._replace(order=(*stages.order[:i], device, *stages.order[i + 1 :]))


def _longer(stages: Stages, unused: Sequence[int]) -> Iterator[Stages]:
    """A stage is split and one part given to an unused device."""
    for k, (start, end) in enumerate(itertools.pairwise(stages.ends)):
        places = {start + (end - start) * part // 4 for part in (1, 2, 3)} | {start + 1, end - 1}
        for place, device, at in itertools.product(sorted(places), unused, (k, k + 1)):
            if start < place < end:
                order = (*stages.order[:at], device, *stages.order[at:])
                yield Stages(order, (*stages.ends[: k + 1], place, *stages.ends[k + 1 :]))


def _shorter(stages: Stages) -> Iterator[Stages]:
    """A device goes, and its stage to a neighbour."""
    for k in range(len(stages.order)):
        for cut in {k, k + 1} & set(range(1, len(stages.order))):
            yield Stages((*stages.order[:k], *stages.order[k + 1 :]), (*stages.ends[:cut], *stages.ends[cut + 1 :]))


def _exchanged(first: Stages, second: Stages) -> Iterator[tuple[Stages, Stages]]:
    """Two devices of different replicas swap."""
    for i, j in itertools.product(range(len(first.order)), range(len(second.order))):
        a, b = list(first.order), list(second.order)
        a[i], b[j] = b[j], a[i]
        yield first._replace(order=tuple(a)), second._replace(order=tuple(b))


def _moved(now: Replicas, giver: int, taker: int) -> Iterator[Change]:
    """A device goes from one replica to another."""
    pairs = [
        (shorter, longer)
        for shorter in _shorter(now[giver])
        for device in set(now[giver].order) - set(shorter.order)
        for longer in _longer(now[taker], (device,))
    ]
    if pairs:
        given, taken = zip(*pairs, strict=True)
        yield {giver: given, taker: taken}
