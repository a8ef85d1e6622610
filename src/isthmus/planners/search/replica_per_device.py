"""Plans in which every chosen device is a replica of its own: the best set of devices for that.

A device that computes `w / v` seconds per micro-batch ends `floor(T v / w)` of them in T seconds. The step of a set is
the least T in which all of them end the batch, and what the set takes to average. Every set is looked at where devices
are few; elsewhere a set grows by the device that makes its step shortest, of the fastest that are left.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Sequence

from isthmus.cost import PlanLayout, Problem, build_replicas
from isthmus.cost.sync import buffer_bytes, fastest, group_s
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep, looked_at
from isthmus.plans import Plan, SyncGroup

MOST_SETS_OF = 7
"""Devices up to which every set is looked at."""
MOST_TRIED = 6
"""Devices of which one joins a set."""
MOST_BUILT = 3
"""Plans that are built, the best first; the first may not fit."""

Chosen = tuple[int, ...]


def replicas_per_device(problem: Problem) -> Iterator[Plan]:
    """The best plans of this kind, of two replicas and more."""
    if problem.most_replicas < 2:
        return
    search = _Sets(problem)
    for chosen in sorted(search.sets(), key=search.step_s)[:MOST_BUILT]:
        names, shares = search.named(chosen), search.shares(chosen)
        layouts = [PlanLayout((name,), (), share) for name, share in zip(names, shares, strict=True) if share]
        if len(layouts) > 1:
            with contextlib.suppress(FleetTooSmall):
                yield keep(build_replicas(problem, layouts, planner="auto"))


class _Sets:
    def __init__(self, problem: Problem) -> None:
        self._problem, self._fleet = problem, problem.fleet
        work = problem.cumulative_flops[-1]
        self._each_s = [work / device.sustained_flops_per_s for device in self._fleet.devices]
        self._by_speed = sorted(range(len(self._each_s)), key=lambda d: (self._each_s[d], d))
        ops = problem.flow.graph.ops
        trained = [op.name for op in ops if op.kind == "parameter" and any(op.requires_grad)]
        self._size_bytes = buffer_bytes(problem.flow, trained, "gradients")
        self._known: dict[Chosen, float] = {}

    def named(self, chosen: Chosen) -> list[str]:
        return [self._fleet.names[d] for d in chosen]

    def sets(self) -> list[Chosen]:
        """Those looked at."""
        devices, most = len(self._each_s), self._problem.most_replicas
        if devices <= MOST_SETS_OF:
            sizes = range(2, most + 1)
            return [chosen for size in sizes for chosen in itertools.combinations(range(devices), size)]
        pairs = list(itertools.combinations(sorted(self._by_speed[:MOST_TRIED]), 2))
        grown: Chosen = min(pairs, key=self.step_s)
        found: list[Chosen] = [grown]
        while len(grown) < most:
            left = [d for d in self._by_speed if d not in grown][:MOST_TRIED]
            grown = min((tuple(sorted((*grown, d))) for d in left), key=self.step_s)
            found.append(grown)
        return found

    def step_s(self, chosen: Chosen) -> float:
        if chosen not in self._known:
            looked_at()
            shares = self.shares(chosen)
            group = SyncGroup(
                devices=tuple(self.named(chosen)), parameters=(), iterations=(0,), size_bytes=self._size_bytes
            )
            longest_s = max(self._each_s[d] * share for d, share in zip(chosen, shares, strict=True))
            averaging_s = group_s(self._fleet, fastest(self._fleet, group)) / self._problem.sync.period
            self._known[chosen] = longest_s + averaging_s
        return self._known[chosen]

    def shares(self, chosen: Sequence[int]) -> list[int]:
        """Micro-batch after micro-batch to the device that ends it soonest."""
        shares = [0] * len(chosen)
        ends = [(self._each_s[d], k) for k, d in enumerate(chosen)]
        heapq.heapify(ends)
        for _ in range(self._problem.micro_batches):
            _, k = ends[0]
            shares[k] += 1
            heapq.heapreplace(ends, ((shares[k] + 1) * self._each_s[chosen[k]], k))
        return shares
