"""Simulated annealing over a chain of groups: two groups exchange members, or a stretch of the chain turns round.

The chain is the order of the groups, so no salesman's path is solved on the way: a move costs two groups and at most
four hops, most of them known already (`landscape`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from isthmus.planners.observer import stopped
from isthmus.planners.placement.landscape import Group, Landscape

HOT, COLD = 0.24, 8e-4
"""First and last temperature as shares of a group's part of the first cost: hotter forgets a good start, colder stands
still."""


class Chain(NamedTuple):
    groups: list[Group]
    sync_s: list[float]
    compute_s: list[float]
    hops_s: list[float]
    """[groups - 1]: between each group and the next."""
    total_s: float


class Annealer:
    """Anneals chains on one landscape, whose kinds take `compute_s` [kinds] seconds for a stage."""

    def __init__(self, landscape: Landscape, compute_s: Sequence[float]) -> None:
        self._landscape, self._compute_s = landscape, compute_s

    def chain(self, groups: list[Group]) -> Chain:
        sync = [self._landscape.group_s(group) for group in groups]
        compute = [self._slowest(group) for group in groups]
        hops = [self._landscape.hop_s(a, b) for a, b in itertools.pairwise(groups)]
        return Chain(groups, sync, compute, hops, max(sync) + sum(compute) + sum(hops))

    def run(self, start: Chain, *, iterations: int, seed: int) -> Chain:
        """The best chain met on the way; the same seed finds the same."""
        rng = random.Random(seed)
        now = best = start
        if len(start.groups) == 1 or start.total_s <= 0:
            return start
        part_s, cooling = start.total_s / len(start.groups), math.log(COLD / HOT)
        for step in range(iterations):
            if stopped():
                break
            temperature = HOT * part_s * math.exp(cooling * step / iterations)
            # The draw comes first: an offer is dropped as soon as its cost passes the limit.
            limit = now.total_s - temperature * math.log(1.0 - rng.random())
            offer = self._exchanged(now, rng, limit) if rng.random() < 0.8 else self._turned(now, rng)
            if offer is not None and offer.total_s <= limit:
                now = offer
                if now.total_s < best.total_s - 1e-12:
                    best = now
        return best

    def _slowest(self, group: Group) -> float:
        return max(self._compute_s[kind] for kind in group)

    def _turned(self, now: Chain, rng: random.Random) -> Chain:
        """A stretch reversed: the hops inside stay, those at its ends are new."""
        a, b = sorted(rng.sample(range(len(now.groups) + 1), 2))
        turn = [*range(a), *range(b - 1, a - 1, -1), *range(b, len(now.groups))]
        groups = [now.groups[k] for k in turn]
        hops = [*now.hops_s[:a], *reversed(now.hops_s[a : b - 1]), *now.hops_s[b - 1 :]]
        for k in (a - 1, b - 1):
            if 0 <= k < len(hops):
                hops[k : k + 1] = [self._landscape.hop_s(groups[k], groups[k + 1])]
        sync, compute = [now.sync_s[k] for k in turn], [now.compute_s[k] for k in turn]
        return Chain(groups, sync, compute, hops, max(sync) + sum(compute) + sum(hops))

    def _exchanged(self, now: Chain, rng: random.Random, limit: float) -> Chain | None:
        """Two groups with one kind of one exchanged for one kind of the other; None where that is beyond the limit."""
        i = self._worst(now) if rng.random() < 0.3 else rng.randrange(len(now.groups))
        j = (i + 1 + rng.randrange(len(now.groups) - 1)) % len(now.groups)
        offered = _swap(now.groups[i], now.groups[j], rng)
        if offered is None:
            return None
        groups, sync, compute, hops = list(now.groups), list(now.sync_s), list(now.compute_s), list(now.hops_s)
        for k, group in zip((i, j), offered, strict=True):
            groups[k], sync[k], compute[k] = group, self._landscape.group_s(group), self._slowest(group)
        touched = {k for k in (i - 1, i, j - 1, j) if 0 <= k < len(hops)}
        for k in touched:
            hops[k] = 0.0
        total = max(sync) + sum(compute) + sum(hops)
        for k in touched:
            if total > limit:
                return None
            hops[k] = self._landscape.hop_s(groups[k], groups[k + 1])
            total += hops[k]
        return Chain(groups, sync, compute, hops, total)

    @staticmethod
    def _worst(now: Chain) -> int:
        return now.sync_s.index(max(now.sync_s))


def _swap(first: Group, second: Group, rng: random.Random) -> tuple[Group, Group] | None:
    """One member each, or several where both groups hold many of the two kinds."""
    a, b = rng.choice(first), rng.choice(second)
    if a == b:
        return None
    most = min(first.count(a), second.count(b))
    times = rng.randint(1, most) if most > 1 and rng.random() < 0.3 else 1
    return _with(first, a, b, times), _with(second, b, a, times)


def _with(group: Group, old: int, new: int, times: int) -> Group:
    members = list(group)
    for _ in range(times):
        members.remove(old)
    return tuple(sorted(members + [new] * times))
