"""OP-Fence: consecutive operators for each community of well-joined devices (FusionLLM, section 4).

The paper states the idea and no pseudocode. Built here: Louvain communities on the bandwidth graph; a chain that visits
one after another over good links (`communities`); a cut that gives each device work in proportion to its speed.
Values then leave a community as seldom as they can. Where a device's memory does not hold its share, devices are filled
in the same order, with the least largest compute time that memory allows.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from isthmus.cost import Problem, build_plan
from isthmus.plan import Plan, classic_in_flight
from isthmus.planners.blocks import Blocks
from isthmus.planners.communities import communities, visiting_order
from isthmus.planners.greedy_fill import greedy_fill, stage_bytes
from isthmus.planners.network import Floats, Network, network_of
from isthmus.planners.orders import scorer_of
from isthmus.planners.relaxation import Path

HALVINGS = 30


def op_fence(problem: Problem) -> Plan:
    """Consecutive operators per Louvain community of the bandwidth graph, balanced by speed inside.

    Raises FleetTooSmall with the device that is short, and by how much.
    """
    network, blocks = network_of(problem), Blocks(problem)
    groups = visiting_order(scorer_of(problem, network, blocks).pair_s, communities(network))
    fence = tuple(device for group in groups for device in group)
    made = _cut(problem, network, blocks, fence)
    names = network.names
    place = {names[d]: k + 1 for k, group in enumerate(groups) for d in group}
    return build_plan(
        problem, [names[d] for d in made.devices], blocks.boundaries(made.cut), planner="op-fence",
        notes={name: f"in community {place[name]} of {len(groups)}" for name in names},
    )  # fmt: skip


def _cut(problem: Problem, network: Network, blocks: Blocks, fence: Sequence[int]) -> Path:
    """Balanced if it fits, else filled; with the micro-batches in flight of the schedule, else with the fewest."""
    least = problem.micro_batches if problem.schedule == "gpipe" else 1
    speeds = [float(network.speed[d]) for d in fence]
    cut = balanced(blocks.work, speeds)
    share = Path(tuple(fence[: len(cut) + 1]), tuple(cut))
    for held in (classic_in_flight(problem.schedule, len(share.devices), problem.micro_batches), None):
        limits = held or (least,) * len(share.devices)
        if _fits(network, blocks, share, limits):
            return share
        if (filled := _filled(network, blocks, share.devices, limits)) is not None:
            return filled
    return greedy_fill(problem, network, blocks)


def balanced(work: Floats, speeds: Sequence[float]) -> list[int]:
    """Boundaries between blocks, nearest to shares of the work in proportion to the speeds; each stage gets a block.

    `work[b]` is what the first b blocks take, so block numbers are 1 .. len(work) - 2. Speeds beyond the number of
    blocks get nothing.
    """
    count = len(work) - 1
    used = np.array(speeds[:count])
    targets = np.cumsum(used)[:-1] / used.sum() * float(work[-1])
    chosen: list[int] = []
    for k, target in enumerate(targets):
        first, last = (chosen[-1] if chosen else 0) + 1, count - (len(targets) - k)
        after = min(bisect.bisect_left(work, target, first, last + 1), last)
        near = [b for b in (after - 1, after) if first <= b <= last]
        chosen.append(min(near, key=lambda b: abs(float(work[b]) - target)))
    return chosen


def _fits(network: Network, blocks: Blocks, path: Path, in_flight: Sequence[int]) -> bool:
    stages = itertools.pairwise((0, *path.cut, blocks.count))
    return all(
        stage_bytes(blocks, start, end, held) <= network.memory[device]
        for (start, end), device, held in zip(stages, path.devices, in_flight, strict=True)
    )


def _filled(network: Network, blocks: Blocks, order: Sequence[int], in_flight: Sequence[int]) -> Path | None:
    """The cut in this order whose largest compute time is least, as far as filling shows; None where none fits."""
    low, high = 0.0, float(blocks.work[-1] / network.speed[list(order)].min())
    best = _fill(network, blocks, order, in_flight, high)
    for _ in range(HALVINGS if best else 0):
        middle = (low + high) / 2
        found = _fill(network, blocks, order, in_flight, middle)
        best, low, high = (found, low, middle) if found else (best, middle, high)
    return best


def _fill(
    network: Network, blocks: Blocks, order: Sequence[int], in_flight: Sequence[int], most_s: float
) -> Path | None:
    """Each device takes what it computes in `most_s` and holds, and is passed over where that is nothing."""
    devices: list[int] = []
    ends = [0]
    for device, held in zip(order, in_flight, strict=True):
        start, memory = ends[-1], float(network.memory[device])
        most = float(blocks.work[start] + most_s * network.speed[device])
        end = bisect.bisect_right(blocks.work, most, start, blocks.count + 1) - 1
        if stage_bytes(blocks, start, end, held) > memory:
            sizes = range(start, end + 1)
            end = start + bisect.bisect_right(sizes, memory, key=lambda e: stage_bytes(blocks, start, e, held)) - 1
        if end > start:
            devices.append(device)
            ends.append(end)
        if ends[-1] == blocks.count:
            return Path(tuple(devices), tuple(ends[1:-1]))
    return None
