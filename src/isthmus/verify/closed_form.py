"""Times and prices of plans made here, by the closed form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from isthmus.errors import UserError
from isthmus.verify.cutting import CutGraph, Part, cut
from isthmus.verify.packing import as_asked
from isthmus.verify.price import paid
from isthmus.verify.reading import Reading
from isthmus.verify.sums import summed_soonest, sums_s
from isthmus.verify.timing import Timed
from isthmus.verify.verdict import CLOSE

MOST_SUBSETS = 7
"""Stages short of memory up to which every set of them is tried as the set that recomputes; beyond, the first k."""


class Setup(NamedTuple):
    """One replica: a device per stage, the first position of each (the first is 0), and its micro-batches."""

    devices: tuple[str, ...]
    starts: tuple[int, ...]
    micro_batches: int
    recompute: tuple[bool, ...] | None = None
    """Which stages compute their forward twice; None for the best choice found."""


class ClosedForm:
    """Times or prices of plans by the closed form, each stage holding as many micro-batches as its memory allows.

    Infinite beyond a limit of the terms, where a buffer would be written in two stages, memory does not hold a device's
    stages, or data or labels would be read elsewhere.
    """

    def __init__(self, reading: Reading, *, priced: bool) -> None:
        self.reading, self._question, self.priced = reading, reading.question, priced
        self._graph = cache(self._cut_graph)

    def judged(self, setups: Sequence[Setup], below: float = float("inf")) -> float:
        """Seconds, or money, of a step; possibly more than it is where it is not `below`."""
        below_s = float("inf") if self.priced else below
        slowest_s = max(self.alone_s(setup, below_s) for setup in setups)
        if slowest_s == float("inf"):
            return slowest_s
        graphs = [graph for setup in setups if (graph := self._sent(setup)) is not None]
        held = [(setup.devices, graph) for setup, graph in zip(setups, graphs, strict=True)]
        sync = msgspec.structs.replace(summed_soonest(self._question.fleet, held), period=self._question.period)
        step_s = slowest_s + sums_s(self._question.fleet, sync)
        terms = self._question.terms
        if terms.max_step_s is not None and step_s > terms.max_step_s * (1 + CLOSE):
            return float("inf")
        if not self.priced and terms.max_price is None:
            return step_s
        none = [(False,) * len(s.devices) for s in setups]  # what is sent does not depend on it
        timed = [Timed(self._question, g, s.devices, n) for s, g, n in zip(setups, graphs, none, strict=True)]
        price = paid(self._question.fleet, timed, [s.micro_batches for s in setups], sync, step_s)
        if terms.max_price is None:
            return price
        return step_s if 1000 * price <= terms.max_price * (1 + CLOSE) else float("inf")

    def alone_s(self, setup: Setup, below_s: float = float("inf")) -> float:
        """Of one replica, before what replicas sum."""
        graph = self._sent(setup) if self._respects(setup) else None
        return float("inf") if graph is None else self._pipeline_s(setup, graph, below_s)

    def _sent(self, setup: Setup) -> CutGraph | None:
        """With the bytes that cross links."""
        graph = self._graph(setup.starts)
        return None if graph is None else as_asked(self._question, graph, setup.devices)

    def _respects(self, setup: Setup) -> bool:
        holders, labels_from = self._question.terms.data_holders, self.reading.labels_from
        if any(a == b for a, b in itertools.pairwise(setup.devices)):
            return False
        if not holders:
            return True
        begins = setup.devices[0] in holders
        if labels_from is None or len(setup.devices) == 1:
            return begins
        return begins and setup.devices[-1] in holders and setup.starts[-1] <= labels_from

    def _cut_graph(self, starts: tuple[int, ...]) -> CutGraph | None:
        try:
            return cut(self.reading, starts)
        except UserError:
            return None

    def _pipeline_s(self, setup: Setup, graph: CutGraph, below_s: float) -> float:
        if setup.recompute is not None:
            return self._chosen_s(setup, graph, setup.recompute)
        none = (False,) * len(setup.devices)
        found_s = self._chosen_s(setup, graph, none)
        if not self._question.recompute:
            return found_s
        timed = Timed(self._question, graph, setup.devices, none)
        unhindered_s = timed.step_s([setup.micro_batches] * len(none), setup.micro_batches)
        if unhindered_s >= min(found_s * (1 - CLOSE), below_s):  # no choice makes it shorter, or short enough
            return found_s
        return min([found_s, *(self._chosen_s(setup, graph, again) for again in self._choices(setup, graph))])

    def _choices(self, setup: Setup, graph: CutGraph) -> Iterator[tuple[bool, ...]]:
        """Sets of stages that recompute, of those that hold fewer than all micro-batches otherwise."""
        scarce = [
            stage for stage, (device, part) in enumerate(zip(setup.devices, graph.parts, strict=True))
            if setup.devices.count(device) > 1 or self._most(setup, device, part, False) < setup.micro_batches
        ]  # fmt: skip
        for count in range(1, len(scarce) + 1):
            few = len(scarce) <= MOST_SUBSETS
            for chosen in itertools.combinations(scarce, count) if few else [scarce[:count]]:
                yield tuple(stage in chosen for stage in range(len(setup.devices)))

    def _chosen_s(self, setup: Setup, graph: CutGraph, recompute: tuple[bool, ...]) -> float:
        limits = self._limits(setup, graph, recompute)
        if limits is None:
            return float("inf")
        return Timed(self._question, graph, setup.devices, recompute).step_s(limits, setup.micro_batches)

    def _most(self, setup: Setup, device: str, part: Part, recompute: bool) -> int:
        """Micro-batches that the device holds of this stage alone; below 0 where it does not fit at all."""
        room = self._question.room_bytes(device) - part.memory_bytes(0, recompute)
        each = part.kept_bytes(recompute)
        return -1 if room < 0 else min(setup.micro_batches, room // each) if each else setup.micro_batches

    def _limits(self, setup: Setup, graph: CutGraph, recompute: tuple[bool, ...]) -> list[int] | None:
        """As many as fit, the least for all stages first; where stages share a device, the first takes what is left."""
        least = [self._least(setup)] * len(setup.devices)
        free = {device: self._question.room_bytes(device) for device in setup.devices}
        for device, part, count, again in zip(setup.devices, graph.parts, least, recompute, strict=True):
            free[device] -= part.memory_bytes(count, again)
        if min(free.values()) < 0:
            return None
        found: list[int] = []
        for device, part, count, again in zip(setup.devices, graph.parts, least, recompute, strict=True):
            more, each = setup.micro_batches - count, part.kept_bytes(again)
            if each:
                more = min(more, free[device] // each)
                free[device] -= more * each
            found.append(count + more)
        return found

    def _least(self, setup: Setup) -> int:
        return setup.micro_batches if self._question.schedule == "gpipe" else 1
