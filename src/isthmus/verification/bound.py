"""A lower bound on the step of any plan, computed apart from the planners': nothing is searched.

What joining devices by links costs at least, whichever they are: edges are taken lightest first and merge components
(Kruskal). Before edges of weight w are taken, k devices lie in no fewer than c_w components, the largest ones, and
those that hold a replica in no fewer than have the memory; to join them into f trees takes c_w - f edges of weight w or
more.

One replica of S stages: the S fastest devices share the work; stages that receive anything are joined by links as
`DeviceMerging` says; every stage but the first receives what its first block takes (a block lies between two places to
cut). A parameter with users in two blocks is sent there and back, or all blocks between stay on one device. Several
replicas: together they complete no more micro-batches than all speeds allow, and summing G bytes of gradients takes two
rounds, and (R - 1) times 2 G bytes, which at best spread over all N (N - 1) links; once in a period of steps.
"""

from __future__ import annotations

import bisect
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from isthmus.fleet import Fleet
from isthmus.verification.packing import wire_bytes
from isthmus.verification.question import FLOAT32_BYTES
from isthmus.verification.reading import GraphReading

MOST_JOINED = 512  # devices up to which components are counted; beyond, each device has its lightest edge

Weights = Mapping[tuple[int, int], float]  # between kinds of devices; (k, k) joins two devices of one kind


def kinds_of(fleet: Fleet) -> list[list[str]]:
    """Devices that no link names, by region; each other one alone."""
    named = {end for route in fleet.links.devices for end in (route.source, route.target)}
    found: dict[tuple[bool, str], list[str]] = {}
    for device in fleet.devices:
        alone = device.name in named
        found.setdefault((alone, device.name if alone else device.region), []).append(device.name)
    return list(found.values())


def _fewest(sizes: Iterable[int], need: int) -> int:
    """So many of them, the largest, come to what is needed."""
    return 1 + sum(1 for held in itertools.accumulate(sorted(sizes, reverse=True)) if held < need)


class Rooms(NamedTuple):
    """Bytes of each kind's devices, and what they must hold together."""

    each: Sequence[Sequence[int]]
    need: int


class DeviceMerging:
    """`most` devices at most are joined. `weights` must not depend on the direction."""

    def __init__(self, sizes: Sequence[int], weights: Weights, most: int, rooms: Rooms) -> None:
        self._count, self._most, self._rooms = sum(sizes), most, rooms
        self._steps: list[tuple[float, list[int]]] = []
        """(weight, [k]: components of the k devices before edges of that weight), lightest first."""
        self._nearest: list[float] = []  # where there are too many devices: the lightest edge of each, lightest first
        if self._count > MOST_JOINED:
            for kind, size in enumerate(sizes):
                lightest = min(w for (a, b), w in weights.items() if kind in (a, b))
                self._nearest += [lightest] * size
            self._nearest = sorted(self._nearest)[: self._count - 1]
        elif self._count > 1:
            self._merge(sizes, weights)

    def _merge(self, sizes: Sequence[int], weights: Weights) -> None:
        kind = [k for k, size in enumerate(sizes) for _ in range(size)]
        edges = sorted((weights[kind[a], kind[b]], a, b) for a, b in itertools.combinations(range(self._count), 2))
        home, members = list(range(self._count)), {d: [d] for d in range(self._count)}
        room = [size_bytes for own in self._rooms.each for size_bytes in own]
        for weight, group in itertools.groupby(edges, key=lambda edge: edge[0]):
            merging = [(a, b) for _, a, b in group if home[a] != home[b]]
            if merging:
                together = list(itertools.accumulate(sorted(map(len, members.values()), reverse=True)))
                held = _fewest((sum(room[d] for d in own) for own in members.values()), self._rooms.need)
                need = [max(held, bisect.bisect_left(together, k) + 1) for k in range(self._most + 1)]
                self._steps.append((weight, need))
            for a, b in merging:
                if home[a] != home[b]:
                    gone = home[b]
                    for device in members.pop(gone):
                        home[device] = home[a]
                        members[home[a]].append(device)
            if len(members) == 1:
                return

    def total(self, devices: int, trees: int) -> float:
        """The least weight that joins so many devices into at most `trees` trees."""
        if self._nearest:
            return sum(self._nearest[: max(devices - trees, 0)])
        before, found = 0.0, 0.0
        for weight, need in self._steps:
            found += (weight - before) * max(0, need[devices] - trees)
            before = weight
        return found

    def heaviest(self, devices: int) -> float:
        """The least weight of the heaviest edge of a tree of so many devices."""
        if self._nearest:
            return self._nearest[devices - 2] if devices > 1 else 0.0
        return max((weight for weight, need in self._steps if need[devices] > 1), default=0.0)


NEVER = float("inf")


class BlockSpan(NamedTuple):
    """A trained parameter with users in several blocks: its bytes, and the FLOPs from its first block to its last."""

    size_bytes: int
    work: int


class Bounds:
    """Lower bounds of one problem, by default on its whole fleet: seconds per step, infinite where nothing fits."""

    def __init__(self, reading: GraphReading, fleet: Fleet | None = None) -> None:
        self.reading, self._question = reading, reading.question
        self._fleet = fleet = fleet or self._question.fleet
        self._rooms = [self._question.room_bytes(name) for name in fleet.names]
        self._micro_batches = self._question.micro_batches
        self._speeds = sorted((self._question.flops_per_s(name) for name in fleet.names), reverse=True)
        self._edges = (0, *reading.places, len(reading.operators))
        self._work = [f + b for f, b in zip(*reading.work, strict=True)]
        self.work = self._work[-1]
        self.blocks = len(self._edges) - 1
        self._largest_block = max(self._work[b] - self._work[a] for a, b in itertools.pairwise(self._edges))

    @cached_property
    def need_bytes(self) -> int:
        """Bytes of the whole model with one micro-batch."""
        state = self._question.state
        return self.reading.kept[-1] + sum(
            v.size_bytes + (v.elements * (state.master + state.gradient + state.optimizer) if v.trained else 0)
            for v in self.reading.variables
        )

    @cached_property
    def fewest(self) -> int:
        """So many devices hold the model with one micro-batch."""
        return _fewest(self._rooms, self.need_bytes)

    @cached_property
    def _links(self) -> tuple[DeviceMerging, DeviceMerging, float, float]:
        """Latency and seconds per byte of joined devices; the best of each link on its own."""
        fleet, kinds = self._fleet, kinds_of(self._fleet)
        ends = {
            (a, b): (kinds[a][0], kinds[b][-1])
            for a, b in itertools.product(range(len(kinds)), repeat=2)
            if a != b or len(kinds[a]) > 1
        }
        links = {pair: fleet.link(*names) for pair, names in ends.items()}
        latency = {pair: link.latency_s for pair, link in links.items()}
        byte_s = {pair: 1 / link.bandwidth_bytes_per_s for pair, link in links.items()}
        sizes, most = [len(names) for names in kinds], min(len(fleet.names), self.blocks)
        either = [{(a, b): min(w[a, b], w[b, a]) for a, b in w} for w in (latency, byte_s)]
        rooms = Rooms([[self._question.room_bytes(name) for name in names] for names in kinds], self.need_bytes)
        joined = [DeviceMerging(sizes, weights, most, rooms) for weights in either]
        return joined[0], joined[1], min(latency.values()), min(byte_s.values())

    @cached_property
    def _received(self) -> tuple[list[Counter[int]], list[Counter[int]]]:
        """Return for each block the bytes that it gets from each block before, and the bytes that it sends back."""
        starts = self._edges[:-1]
        there, back = ([Counter[int]() for _ in starts] for _ in range(2))
        for value in self.reading.values:
            home = bisect.bisect_right(starts, value.made) - 1
            size_bytes = wire_bytes(self._question, value)
            for way, positions in ((there, value.uses), (back, value.returns)):
                for block in {bisect.bisect_right(starts, position) - 1 for position in positions} - {home}:
                    way[block][home] += size_bytes
        return there, back

    @cached_property
    def _taken(self) -> list[list[int]]:
        """Bytes that come to and go back from the first block of a stage, the fewest first."""
        return [sorted(own.total() for own in way[1:]) for way in self._received]

    @cached_property
    def _least_sent(self) -> int:
        """Bytes that one link carries there or back, for the first block of any stage: those of one block before. What
        comes from others may come over other links at the same time."""
        return max(min(max(own.values(), default=0) for own in way[1:]) for way in self._received)

    def _links_s(self, stages: int) -> float:
        """Messages of one micro-batch, both ways."""
        if stages == 1:
            return 0.0
        latency, byte_s, _, best_byte_s = self._links
        found = 0.0
        for sizes in self._taken:
            silent = sum(1 for size in sizes if not size)
            heard = sizes[min(silent, len(sizes) - 1)]
            found += latency.total(stages, 1 + silent)
            found += max(sum(sizes[: stages - 1]) * best_byte_s, heard * byte_s.total(stages, 1 + silent))
        return found

    def single_s(self) -> float:
        """Return the bound of a step of one replica."""
        most = min(len(self._speeds), self.blocks)
        together = list(itertools.accumulate(self._speeds))
        later, fastest, found = self._micro_batches - 1, self._speeds[0], NEVER
        for stages in range(self.fewest, most + 1):
            balanced_s = self.work / together[stages - 1]
            period_s = max(balanced_s, self._largest_block / fastest)
            if stages > 1:
                period_s = max(period_s, self._least_sent * self._links[1].heaviest(stages))
            compute_s = self.work / fastest + later * period_s
            if period_s <= balanced_s:  # slower devices may be given next to nothing
                compute_s = min((j + later) * self.work / together[j - 1] for j in range(1, stages + 1))
            step_s = compute_s + self._links_s(stages)
            found = min(found, step_s if stages == 1 else min(step_s + self._sent_s, self._together_s))
        return found

    @cached_property
    def _spans(self) -> list[BlockSpan]:
        starts, found = self._edges[:-1], list[BlockSpan]()
        for v in self.reading.variables:
            homes = sorted({bisect.bisect_right(starts, position) - 1 for position in v.uses})
            if v.trained and len(homes) > 1:
                work = self._work[self._edges[homes[-1] + 1]] - self._work[self._edges[homes[0]]]
                found.append(BlockSpan(v.size_bytes, work))
        return found

    @cached_property
    def _sent_s(self) -> float:
        """Every parameter of several stages there and back once, over the best link."""
        fleet, kinds = self._fleet, kinds_of(self._fleet)
        ways = [
            (fleet.link(kinds[a][0], kinds[b][-1]), fleet.link(kinds[b][-1], kinds[a][0]))
            for a, b in itertools.combinations_with_replacement(range(len(kinds)), 2)
            if a != b or len(kinds[a]) > 1
        ]
        return sum(
            min(sum(x.latency_s + span.size_bytes / x.bandwidth_bytes_per_s for x in way) for way in ways)
            for span in self._spans
        )

    @cached_property
    def _together_s(self) -> float:
        """The least work between users of one parameter, all on the fastest device."""
        return min((self._micro_batches * span.work / self._speeds[0] for span in self._spans), default=NEVER)

    def several_s(self, fewest: int = 2, most: int = sys.maxsize) -> float:
        """Return the bound of fewest to most replicas; infinite where there cannot be so many."""
        devices = len(self._speeds)
        if self.fewest > min(devices, self.blocks):
            return NEVER
        room = sum(self._rooms) // self.need_bytes if self.need_bytes else devices
        most = min(most, devices // self.fewest, self._micro_batches, room)
        fill_s = self.work / self._speeds[0] + self._links_s(self.fewest)
        return min(
            (
                fill_s
                + (self._micro_batches - count)
                * max(self.work / sum(self._speeds), self._largest_block / self._speeds[0] / count)
                + self.averaging_s(count)
                for count in range(fewest, most + 1)
            ),
            default=NEVER,
        )

    def averaging_s(self, replicas: int) -> float:
        """Return the least time that two or more replicas spend on sums, in the mean over a period's steps."""
        devices = len(self._speeds)
        if devices == 1:
            return 0.0
        _, _, latency_s, byte_s = self._links
        gradient_bytes = FLOAT32_BYTES * sum(v.elements for v in self.reading.variables if v.trained)
        link_s = 2 * gradient_bytes * byte_s / (devices * (devices - 1))
        rounds_s = 2 * latency_s if gradient_bytes else 0.0
        return max(rounds_s, (replicas - 1) * link_s) / self._question.period
