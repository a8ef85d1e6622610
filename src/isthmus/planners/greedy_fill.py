"""Does the model fit at all? Devices by memory, largest first, each filled as far as it goes."""

from __future__ import annotations

import bisect

from isthmus.cost import Problem
from isthmus.errors import FleetTooSmall
from isthmus.planners.blocks import Blocks
from isthmus.planners.network import Network
from isthmus.planners.relaxation import Path
from isthmus.units import format_size


def greedy_fill(problem: Problem, network: Network, blocks: Blocks) -> Path:
    """A placement that fits with the fewest micro-batches in flight (GPipe: all).

    Raises FleetTooSmall, which names the device that is left with more than it holds, and by how many bytes.
    """
    held = problem.micro_batches if problem.schedule == "gpipe" else 1
    order = sorted(range(len(network.names)), key=lambda d: -float(network.memory[d]))
    devices: list[int] = []
    cut: list[int] = []
    start = 0
    for position, device in enumerate(order):
        ends = range(start + 1, blocks.count + 1)
        end = start + bisect.bisect_right(
            ends, float(network.memory[device]), key=lambda e: stage_bytes(blocks, start, e, held)
        )
        if end == start:  # not even one block fits, and no later device is larger
            raise _too_small(problem, network, blocks, device, start, start + 1, held)
        devices.append(device)
        if end == blocks.count:
            return Path(tuple(devices), tuple(cut))
        if position == len(order) - 1:
            raise _too_small(problem, network, blocks, device, start, blocks.count, held)
        cut.append(end)
        start = end
    raise AssertionError("a fleet has at least one device")


def stage_bytes(blocks: Blocks, start: int, end: int, in_flight: int) -> int:
    """Memory of the stage [start, end); it never shrinks as `end` grows."""
    fixed = 0
    for variable in blocks.variables:
        at = bisect.bisect_left(variable.uses, start)
        if at < len(variable.uses) and variable.uses[at] < end:
            fixed += variable.borrowed_bytes if at else variable.owned_bytes
    saved = int(blocks.saved[end] - blocks.saved[start])
    for number, use in blocks.live[start]:
        item = blocks.items[number]
        saved += item.forward_bytes if use < end and not item.per_step else 0
    return fixed + in_flight * saved


def _too_small(
    problem: Problem, network: Network, blocks: Blocks, device: int, start: int, end: int, held: int
) -> FleetTooSmall:
    whole, stage = stage_bytes(blocks, 0, blocks.count, held), stage_bytes(blocks, start, end, held)
    capacity = int(network.memory[device])
    hint = f" with {held} micro-batches in flight, as gpipe holds them" if problem.schedule == "gpipe" else ""
    return FleetTooSmall(
        f"model {problem.flow.graph.name!r} does not fit fleet {problem.fleet.name!r}: filled one after another, "
        f"device {network.names[device]} would have to hold {format_size(stage)}, has {format_size(capacity)}: "
        f"{stage - capacity} bytes short (the whole model needs {format_size(whole)}{hint}, the fleet has "
        f"{format_size(int(network.memory.sum()))})"
    )
