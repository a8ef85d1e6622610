"""Devices by class. Devices that are alike are one class, with a count; of others as many are joined as there must be:
each of a class then counts as its fastest with its most memory, and has the best links of any of them."""

from __future__ import annotations

import itertools
import math
from functools import cached_property

import numpy as np

from isthmus.fleet import Fleet
from isthmus.verification.question import Question
from isthmus.verification.stage_figures import Bools, Floats, Ints

NO_LINK = 1e30  # seconds, where a class has one device
MOST_CLASSES = 48  # of which any two are compared


def best_link(fleet: Fleet, source: str, target: str) -> tuple[float, float]:
    """Seconds of latency and of a byte; the least of its trace, where the link has one."""
    link = fleet.link(source, target)
    if link.trace is None:
        return link.latency_s, 1 / link.bandwidth_bytes_per_s
    return min(link.trace.latency_s), 1 / max(link.trace.bandwidth_bytes_per_s)


class DeviceClasses:
    """Arrays are by class. `most_states`: the numbers of devices of each class, as combinations of these."""

    def __init__(self, question: Question, most_states: int, most_used: int) -> None:
        """`most_used`: devices that are asked of at once, at most."""
        self._question = question
        self._most_used = most_used
        self._holders = set(question.constraints.data_holders) or set(question.fleet.names)
        self.members = self._alike()
        names = [own[0] for own in self.members]
        self._speed = [question.flops_per_s(name) for name in names]
        self._links()
        while len(self.members) > MOST_CLASSES:
            self._join(*self._nearest_in_speed())
        while len(self.members) > 1 and self.states > most_states:
            self._join(*self._most_alike())
        self.counts: Ints = np.array([self._count(own) for own in self.members])
        self.speed: Floats = np.array(self._speed)
        self.room: Floats = np.array([max(map(question.room_bytes, own)) for own in self.members], dtype=np.float64)
        self.holds: Bools = np.array([not self._holders.isdisjoint(own) for own in self.members])

    def _count(self, own: list[str]) -> int:
        return min(len(own), self._most_used)

    @property
    def states(self) -> float:
        return math.prod(self._count(own) + 1.0 for own in self.members)

    def _alike(self) -> list[list[str]]:
        question, fleet = self._question, self._question.fleet
        named = {end for route in fleet.links.devices for end in (route.source, route.target)}
        found: dict[object, list[str]] = {}
        for device in fleet.devices:
            name = device.name
            lacked = question.constraints.lacked_by(name)
            figures = (question.flops_per_s(name), question.room_bytes(name), lacked, name in self._holders)
            found.setdefault((figures, name if name in named else None, device.region), []).append(name)
        return list(found.values())

    def _links(self) -> None:
        fleet, count = self._question.fleet, len(self.members)
        self.latency_s, self.byte_s = (np.full((count, count), NO_LINK) for _ in range(2))
        for a, b in itertools.product(range(count), repeat=2):
            if a != b or len(self.members[a]) > 1:
                self.latency_s[a, b], self.byte_s[a, b] = best_link(fleet, self.members[a][0], self.members[b][-1])

    def _nearest_in_speed(self) -> tuple[int, int]:
        """Two classes, at one place if there are such."""
        fleet = self._question.fleet
        homes = [fleet.device(own[0]).region for own in self.members]
        order = sorted(range(len(homes)), key=lambda k: (homes[k], self._speed[k]))
        pairs = itertools.pairwise(order)
        return min(
            pairs, key=lambda p: (homes[p[0]] != homes[p[1]], abs(np.log(self._speed[p[0]] / self._speed[p[1]])))
        )

    def _most_alike(self) -> tuple[int, int]:
        speed, sizes = np.log(self._speed), np.array([len(own) for own in self.members])
        links = np.log(np.minimum(np.concatenate([self.byte_s, self.byte_s.T], axis=1), 1.0) + 1e-30)
        latency = np.log(np.minimum(np.concatenate([self.latency_s, self.latency_s.T], axis=1), 1e3) + 1e-4)
        apart = np.abs(links[:, None] - links[None]).mean(axis=2) + np.abs(latency[:, None] - latency[None]).mean(
            axis=2
        )
        apart = np.abs(speed[:, None] - speed[None]) + 0.3 * apart
        apart *= np.minimum(sizes[:, None], sizes[None])
        np.fill_diagonal(apart, np.inf)
        a, b = np.unravel_index(int(apart.argmin()), apart.shape)
        return int(a), int(b)

    def _join(self, one: int, other: int) -> None:
        a, b, count = min(one, other), max(one, other), len(self.members)
        self._speed[a] = max(self._speed[a], self._speed[b])
        self.members[a] = self.members[a] + self.members[b]
        del self._speed[b], self.members[b]
        keep = [k for k in range(count) if k != b]
        for name in ("latency_s", "byte_s"):
            table = getattr(self, name)
            inside = min(table[a, a], table[b, b], table[a, b], table[b, a])
            table[a], table[:, a] = np.minimum(table[a], table[b]), np.minimum(table[:, a], table[:, b])
            table[a, a] = inside
            setattr(self, name, np.ascontiguousarray(table[np.ix_(keep, keep)]))

    @cached_property
    def regions(self) -> list[set[str]]:
        fleet = self._question.fleet
        return [{fleet.device(name).region for name in own} for own in self.members]

    def lacks(self, target: str) -> Bools:
        """Whether no device of a class has this operator."""
        lacked_by = self._question.constraints.lacked_by
        return np.array([all(target in lacked_by(name) for name in own) for own in self.members])

    @cached_property
    def state_counts(self) -> Ints:
        """[state, class]: devices of each, in all combinations."""
        grids = np.meshgrid(*(np.arange(count + 1) for count in self.counts), indexing="ij")
        return np.stack([grid.ravel() for grid in grids], axis=1)

    @cached_property
    def strides(self) -> Ints:
        """[class]: how far the state is that has one more of it."""
        counts = self.counts + 1
        return np.array([math.prod(counts[k + 1 :].tolist()) for k in range(len(counts))])
