"""Does the model fit at all? Devices by memory, largest first, each filled as far as it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost import Problem
from isthmus.cost.blocks import Blocks, alternatives
from isthmus.cost.cut_table import stage_bytes
from isthmus.cost.network import FleetNetwork
from isthmus.errors import FleetTooSmall
from isthmus.planners.search.fixed_placement import fixed_placement_of
from isthmus.units import format_size


class Path(NamedTuple):
    """Devices by number, and the block boundaries between them."""

    devices: tuple[int, ...]
    cut: tuple[int, ...]


def greedy_fill(problem: Problem, network: FleetNetwork, blocks: Blocks) -> Path:
    """A placement that fits with the fewest micro-batches in flight (GPipe: all).

    Raises FleetTooSmall, which names the device that is left with more than it holds, and by how many bytes; and the
    data holder where it is the one.
    """
    refused: FleetTooSmall | None = None
    for cut in alternatives(blocks):
        try:
            return _greedy(problem, network, cut)
        except FleetTooSmall as error:
            refused = error
    assert refused is not None, "the blocks are an alternative"
    what_binds = ""
    if problem.schedule == "gpipe" and not problem.recompute:
        with contextlib.suppress(FleetTooSmall):
            _greedy(problem, network, blocks.recomputing())
            what_binds = "; what binds is plan.recompute = false: stages that recompute have room"
    raise FleetTooSmall(f"{refused}{what_binds}")


def _greedy(problem: Problem, network: FleetNetwork, blocks: Blocks) -> Path:
    fixed_placement = fixed_placement_of(problem, network)
    order = sorted(range(len(network.names)), key=lambda d: -float(network.memory[d]))
    filling = _Filling(problem, network, blocks, problem.micro_batches if problem.schedule == "gpipe" else 1)
    if not problem.constraints.data_holders:
        return filling.in_order(order)
    holders = [d for d in order if d in fixed_placement.holders]
    refused: FleetTooSmall | None = None
    for first in holders:
        rest = [d for d in order if d != first]
        for last in [first, *(d for d in holders if d != first)] if fixed_placement.labels_stay else [None]:
            try:
                return filling.in_order([first, *rest], last)
            except FleetTooSmall as error:
                refused = refused or error
    assert refused is not None, "terms with data holders have one"
    try:
        filling.in_order(order)
    except FleetTooSmall:
        raise refused from None
    field = "labels_stay" if fixed_placement.labels_stay else "data_holder"
    raise FleetTooSmall(f"{refused}; what binds is plan.{field}: without it there is room")


class _Filling:
    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, held: int) -> None:
        self.problem, self.network, self.blocks, self.held = problem, network, blocks, held

    def in_order(self, order: Sequence[int], last: int | None = None) -> Path:
        """Each device filled as far as it goes; with `last`, the last stage on that device, as short as may be."""
        whole = self._need(0, self.blocks.count)
        if last is None or whole <= self.network.memory[order[0]]:
            return self._filled([(d, int(self.network.memory[d])) for d in order], self.blocks.count)
        start = self.blocks.last_start
        kept = self._need(start, self.blocks.count)
        before = [d for d in order if d == order[0] or d != last]
        rooms = [(d, int(self.network.memory[d]) - (kept if d == last else 0)) for d in before]
        if last != order[0] and kept > self.network.memory[last]:
            raise self._too_small(last, start, self.blocks.count, int(self.network.memory[last]))
        if not start:
            raise self._too_small(order[0], 0, self.blocks.count, int(self.network.memory[order[0]]))
        path = self._filled(rooms, start)
        return Path((*path.devices, last), (*path.cut, start))

    def _filled(self, rooms: Sequence[tuple[int, int]], count: int) -> Path:
        """The blocks before `count` on devices with so many bytes each."""
        devices: list[int] = []
        cut: list[int] = []
        start = 0
        for position, (device, room) in enumerate(rooms):
            needs = stage_bytes(self.blocks, start, range(start + 1, count + 1), self.held)
            end = start + int(np.searchsorted(needs, room, side="right"))
            if end == start:  # not even one block fits, and no later device is larger
                raise self._too_small(device, start, start + 1, room)
            devices.append(device)
            if end == count:
                return Path(tuple(devices), tuple(cut))
            if position == len(rooms) - 1:
                raise self._too_small(device, start, count, room)
            cut.append(end)
            start = end
        raise AssertionError("a fleet has at least one device")

    def _need(self, start: int, end: int) -> int:
        return int(stage_bytes(self.blocks, start, [end], self.held)[0])

    def _too_small(self, device: int, start: int, end: int, room: int) -> FleetTooSmall:
        network, problem, name = self.network, self.problem, self.network.names[device]
        holds = name in problem.constraints.data_holders
        why = f" (the data_holder{', where labels_stay' if problem.constraints.labels_stay else ''})" if holds else ""
        whole, stage = self._need(0, self.blocks.count), self._need(start, end)
        hint = f" with {self.held} micro-batches in flight, as gpipe holds them" if problem.schedule == "gpipe" else ""
        total, after = format_size(int(network.memory.sum())), problem.constraints.after_headroom
        return FleetTooSmall(
            f"model {problem.flow.graph.name!r} does not fit fleet {problem.fleet.name!r}: filled one after another, "
            f"device {name}{why} would have to hold "
            f"{format_size(stage)}, offers {format_size(room)}{after}: {format_size(stage - room)} short "
            f"(the whole model needs {format_size(whole)}{hint}, the fleet offers {total}{after})"
        )
