"""How long a group of devices, one of each replica, takes to sum the gradients of some blocks: at least.

With B bytes of n devices, whichever order these are in, and if no uplink is shared:

    sharded       2 max (latency + B / n / bandwidth) over all links
    ring          2 (n - 1) max (latency + B / n / bandwidth) over its hops, in the ring whose slowest hop is fastest
    hierarchical  2 max (latency + B / bandwidth) from members to the leader of their site, and as sharded among the
                  leaders, whose slowest links to others are fastest

A part of a buffer is less than B / n by less than an element. Where the sharded sum ends first in any case, each link
carries 2 B / n.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.verification.question import CLOSE, FLOAT32_BYTES, Question
from isthmus.verification.sent import Floats, Ints

MOST_IN_RING = 5  # devices: of more, a ring has no hop that is faster than the fastest of the device it leaves


class GroupSums(NamedTuple):
    """[start]: of the blocks from there to an end."""

    seconds: Floats  # in the mean over a period's steps, at least
    carried: Floats  # bytes that each link of the group carries both times together, at least


class GroupTimes:
    """`names`: of each kind's devices; `gradients`: [block] bytes, of so many parameters."""

    def __init__(self, question: Question, names: Sequence[Sequence[str]], gradients: Floats, parameters: int) -> None:
        self._question, self._names = question, names
        self._numbers = 2 * (parameters + 1)
        self._until = np.concatenate([[0.0], np.cumsum(gradients)])
        self._known: dict[tuple[tuple[int, ...], int], GroupSums] = {}

    def sums(self, members: tuple[int, ...], starts: Ints, end: int) -> GroupSums:
        """Return the least sums of devices of these kinds."""
        members = tuple(sorted(members))
        if (members, end) not in self._known:
            size_bytes = self._until[end] - self._until[:end]
            seconds, carried = self._soonest(self._devices(members), size_bytes)
            # In a period of several steps each group may have one of its own. Of shared uplinks nothing is known here.
            known = self._question.period == 1 and not self._question.shares_uplinks
            alone = size_bytes > 0 if known else np.zeros(end, dtype=np.bool_)
            self._known[members, end] = GroupSums(
                np.where(size_bytes > 0, seconds, 0.0) / self._question.period, np.where(alone, carried, 0.0)
            )
        return GroupSums(*(each[starts] for each in self._known[members, end]))

    def _devices(self, members: Sequence[int]) -> tuple[str, ...]:
        """Different ones."""
        met, found = Counter[int](), list[str]()
        for kind in members:
            found.append(self._names[kind][met[kind]])
            met[kind] += 1
        return tuple(found)

    def _soonest(self, names: tuple[str, ...], size_bytes: Floats) -> tuple[Floats, Floats]:
        """[size]: seconds by the collective that ends first; and what each link carries, if that is the sharded one."""
        fleet, count = self._question.fleet, len(names)
        latency, byte_s = np.zeros((2, count, count))
        for a, b in itertools.permutations(range(count), 2):
            link = fleet.link(names[a], names[b])
            latency[a, b], byte_s[a, b] = link.latency_s, 1 / link.bandwidth_bytes_per_s

        def slowest_s(links: Sequence[tuple[int, int]], size: Floats) -> Floats:
            sources, targets = np.array(links).T
            return (latency[sources, targets] + byte_s[sources, targets] * size[:, None]).max(axis=1)

        def sharded_s(devices: Sequence[int]) -> Floats:
            return 2 * slowest_s(list(itertools.permutations(devices, 2)), self._part(size_bytes, len(devices)))

        found = list[Floats]()
        if count > MOST_IN_RING:
            hop_s = latency + byte_s * self._part(size_bytes, count)[:, None, None]
            found.append(2 * (count - 1) * np.where(np.eye(count) > 0, np.inf, hop_s).min(axis=2).max(axis=1))
        for hops in _best_rings(latency + byte_s) if count <= MOST_IN_RING else ():
            found.append(2 * (count - 1) * slowest_s(hops, self._part(size_bytes, count)))
        sites = [[m for m in range(count) if fleet.device(names[m]).region == home] for home in self._homes(names)]
        for leaders in itertools.product(*_best_leaders(byte_s, sites)) if 1 < len(sites) < count else ():
            inside = [(m, lead) for lead, site in zip(leaders, sites, strict=True) for m in site if m != lead]
            back = [(lead, m) for m, lead in inside]
            found.append(slowest_s(inside, size_bytes) + sharded_s(leaders) + slowest_s(back, size_bytes))
        whole_s = sharded_s(range(count))
        if not found:
            return whole_s, size_bytes
        other_s, part = np.minimum.reduce(found), self._part(size_bytes, count)
        # Numbers that go with gradients are not counted, and parts are rounded.
        slower_s = whole_s + (self._numbers + 4) * FLOAT32_BYTES * byte_s.max()
        return np.minimum(whole_s, other_s), np.where(slower_s < other_s, 2 * part, 0.0)

    def _part(self, size_bytes: Floats, count: int) -> Floats:
        """Return the least part of each of so many devices: it is rounded to elements in each step of a period."""
        rounded = FLOAT32_BYTES * self._question.period if count > 2 else 0
        return np.maximum(0.0, size_bytes / count - rounded)

    def _homes(self, names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(self._question.fleet.device(name).region for name in names))


def _best_rings(hop_s: Floats) -> list[list[tuple[int, int]]]:
    """The hops of each ring of more than two devices whose slowest hop is fastest. `hop_s`: [source, target]."""
    count = len(hop_s)
    orders = [(0, *rest) for rest in itertools.permutations(range(1, count))] if count > 2 else []
    rings = [list(zip(order, (*order[1:], 0), strict=True)) for order in orders]
    slowest_s = [max(float(hop_s[hop]) for hop in ring) for ring in rings]
    return [ring for ring, slowest in zip(rings, slowest_s, strict=True) if slowest <= min(slowest_s) * (1 + CLOSE)]


def _best_leaders(byte_s: Floats, sites: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the members of each site whose slowest link to others is fastest. `byte_s`: [source, target]."""
    found = list[list[int]]()
    for site in sites:
        others = [m for each in sites if each is not site for m in each]
        worst_s = {m: max(byte_s[m, others].max(), byte_s[others, m].max()) for m in site} if others else {}
        found.append([m for m in site if others and worst_s[m] <= min(worst_s.values()) * (1 + CLOSE)])
    return found
