"""OP-Fence: consecutive operators for each community of well-joined devices (FusionLLM, section 4).

The paper states the idea and no pseudocode. Built here: Louvain communities on the bandwidth graph; a chain that visits
one after another over good links, and leaves each only once; a cut that gives each device work in proportion to its
speed, moved where less crosses as far as the link makes that worth while. Where a device's memory does not hold its
share, devices are filled in the same order, with the least largest compute time that memory allows.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import networkx as nx
import numpy as np
from networkx.algorithms.community import louvain_communities

from isthmus.cost import Problem, build_plan
from isthmus.cost.blocks import Blocks, alternatives
from isthmus.cost.cut_table import stage_bytes
from isthmus.cost.network import FleetNetwork, Floats, network_of
from isthmus.planners.placement.grouping import open_path
from isthmus.planners.search.greedy_fill import Path, greedy_fill
from isthmus.planners.search.local_search import nearest_tour, two_opt
from isthmus.planners.search.orders import scorer_of
from isthmus.plans import Plan, classic_in_flight

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
    why = {names[d]: f"in community {k} of {len(groups)}" for k, group in enumerate(groups, 1) for d in group}
    idle = {names[d]: "no place to cut gives it a share that it holds" for d in set(fence) - set(made.devices)}
    return build_plan(
        problem,
        [names[d] for d in made.devices],
        blocks.boundaries(made.cut),
        planner="op-fence",
        notes=why | idle,
    )


def _cut(problem: Problem, network: FleetNetwork, blocks: Blocks, fence: Sequence[int]) -> Path:
    """Balanced if it fits, else filled; with the micro-batches in flight of the schedule, else with the fewest."""
    speeds = [float(network.speed[d]) for d in fence]
    share = _without_idle(fence, balanced(blocks.work, speeds, _crossing_s(network, blocks, fence)), blocks.count)

    def classic(stages: int) -> tuple[int, ...]:
        return classic_in_flight(problem.schedule, stages, problem.micro_batches)

    def fewest(stages: int) -> tuple[int, ...]:
        return (problem.micro_batches if problem.schedule == "gpipe" else 1,) * stages

    for in_flight, kept in itertools.product((classic, fewest), alternatives(blocks)):
        if _fits(network, kept, share, in_flight(len(share.devices))):
            return share
        # All of the fence: a device without a share may have the memory that is wanted.
        if (filled := _filled(network, kept, fence, in_flight(len(fence)))) is not None:
            return filled
    return greedy_fill(problem, network, blocks)


def balanced(work: Floats, speeds: Sequence[float], crossing_s: Floats | None = None) -> list[int]:
    """Boundaries between blocks near to shares of the work in proportion to the speeds, in no descending order.

    `work[b]` is what the first b blocks take. `crossing_s[k, b]` are the seconds in which what crosses boundary b
    passes from stage k to the next and back. Up to half way to the next shares, and to the ends of a block that
    reaches further, a boundary goes where these and the compute time that it shifts are least in sum; without them to
    the nearest. Boundaries that fall together leave a device without work: one block may span several shares.
    """
    used = np.array(speeds)
    marks = np.concatenate([[0.0], np.cumsum(used) / used.sum() * float(work[-1])])
    chosen = [0]
    for k, target in enumerate(marks[1:-1]):
        allowed = np.arange(chosen[-1], len(work))
        behind, ahead = np.maximum(target - work[allowed], 0.0), np.maximum(work[allowed] - target, 0.0)
        if crossing_s is None:
            cost = behind + ahead
        else:
            # The nearest place on either side is always near enough.
            most_behind = max((target - marks[k]) / 2, behind.min(where=ahead == 0, initial=np.inf))
            most_ahead = max((marks[k + 2] - target) / 2, ahead.min(where=behind == 0, initial=np.inf))
            near = (behind <= most_behind) & (ahead <= most_ahead)
            cost = np.where(near, behind / used[k + 1] + ahead / used[k] + crossing_s[k, allowed], np.inf)
        chosen.append(int(allowed[cost.argmin()]))
    return chosen[1:]


def _without_idle(order: Sequence[int], boundaries: Sequence[int], count: int) -> Path:
    stages = zip(order, itertools.pairwise((0, *boundaries, count)), strict=True)
    used = [(device, end) for device, (start, end) in stages if end > start]
    return Path(tuple(device for device, _ in used), tuple(end for _, end in used[:-1]))


def _crossing_s(network: FleetNetwork, blocks: Blocks, fence: Sequence[int]) -> Floats:
    """[k, b]: seconds of boundary b's values from device k of the fence to the next, and of their gradients back."""
    sizes = np.zeros((2, blocks.count + 1))
    for item in blocks.items:
        if not item.per_step:
            sizes[:, item.made_in + 1 : item.uses[-1] + 1] += np.array([[item.forward_bytes], [item.backward_bytes]])
    here, after = list(fence[:-1]), list(fence[1:])
    return network.byte_s[here, after][:, None] * sizes[0] + network.byte_s[after, here][:, None] * sizes[1]


def _fits(network: FleetNetwork, blocks: Blocks, path: Path, in_flight: Sequence[int]) -> bool:
    stages = itertools.pairwise((0, *path.cut, blocks.count))
    return all(
        stage_bytes(blocks, start, [end], held)[0] <= network.memory[device]
        for (start, end), device, held in zip(stages, path.devices, in_flight, strict=True)
    )


def _filled(network: FleetNetwork, blocks: Blocks, order: Sequence[int], in_flight: Sequence[int]) -> Path | None:
    """The cut in this order whose largest compute time is least, as far as filling shows; None where none fits."""
    low, high = 0.0, float(blocks.work[-1] / network.speed[list(order)].min())
    best = _fill(network, blocks, order, in_flight, high)
    for _ in range(HALVINGS if best else 0):
        middle = (low + high) / 2
        found = _fill(network, blocks, order, in_flight, middle)
        best, low, high = (found, low, middle) if found else (best, middle, high)
    return best


def _fill(
    network: FleetNetwork, blocks: Blocks, order: Sequence[int], in_flight: Sequence[int], most_s: float
) -> Path | None:
    """Each device takes what it computes in `most_s` and holds, and is passed over where that is nothing."""
    devices: list[int] = []
    ends = [0]
    for device, held in zip(order, in_flight, strict=True):
        start, memory = ends[-1], float(network.memory[device])
        most = float(blocks.work[start] + most_s * network.speed[device])
        end = bisect.bisect_right(blocks.work, most, start, blocks.count + 1) - 1
        if end > start and stage_bytes(blocks, start, [end], held)[0] > memory:
            needs = stage_bytes(blocks, start, range(start + 1, end + 1), held)
            end = start + int(np.searchsorted(needs, memory, side="right"))
        if end > start:
            devices.append(device)
            ends.append(end)
        if ends[-1] == blocks.count:
            return Path(tuple(devices), tuple(ends[1:-1]))
    return None


Community = tuple[int, ...]
SEED = 0  # louvain visits devices in random order


def communities(network: FleetNetwork) -> list[Community]:
    """Louvain communities of the graph whose weights are the mean bandwidth of both directions, in fleet order."""
    bandwidth = np.divide(1.0, network.byte_s, out=np.zeros_like(network.byte_s), where=network.byte_s > 0)
    graph = nx.from_numpy_array((bandwidth + bandwidth.T) / 2)
    found = louvain_communities(graph, weight="weight", seed=SEED)
    return sorted(tuple(sorted(int(device) for device in members)) for members in found)


def visiting_order(pair_s: Floats, groups: Sequence[Community]) -> list[Community]:
    """Each community as the order of its devices, one community after another.

    `pair_s[i, j]` are the seconds of a typical message from device i to j and back. Communities follow so that the best
    links between neighbours are short in sum. Devices follow by nearest neighbour, then reversals inside a community
    shorten the whole way: where a community is entered and left is part of it.
    """
    pair_s = (pair_s + pair_s.T) / 2
    between = np.array([[float(pair_s[np.ix_(a, b)].min()) for b in groups] for a in groups])
    tour: list[int] = []
    ordered = [groups[k] for k in open_path(between)]
    for members in ordered:
        start = min(members, key=lambda device: float(pair_s[tour[-1], device])) if tour else members[0]
        tour += nearest_tour(pair_s, start, members)
    ends = list(itertools.accumulate((len(members) for members in ordered), initial=0))
    tour = two_opt(pair_s, tour, list(itertools.pairwise(ends)))
    return [tuple(tour[a:b]) for a, b in itertools.pairwise(ends)]
