"""The part of a large fleet that is worth planning for.

A planner that looks at pairs of devices cannot look at all of ten thousand, and a model has only so many places to
cut. Kept are, in equal parts,

    the fastest devices of all
    those from which a whole micro-batch would be back soonest at the fastest one: a typical message there and back, and
    the time to compute it there
    the same around the fastest device of the regions whose few fastest are fastest together

where money counts, the cheapest per FLOP; the devices that have the data, where not all do; and, if these do not hold
the model twice, those with most memory.
What is left out stays in the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from isthmus.cost import Problem
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork, Floats

MOST_DEVICES = 64  # larger fleets are narrowed to so many
HUBS = 3
ROOM = 2.0  # times what the model needs with one micro-batch


def pruned_fleet(problem: Problem, network: FleetNetwork, blocks: Blocks) -> Problem:
    """The problem on the promising devices alone; itself where the fleet is small."""
    if len(network.names) <= MOST_DEVICES:
        return problem
    kept = {network.names[d] for d in _promising(network, blocks)} | set(
        problem.constraints.data_holders[:MOST_DEVICES]
    )
    if problem.constraints.objective == "cost":
        by_price = sorted(problem.fleet.devices, key=lambda device: device.price_per_flop)
        kept |= {device.name for device in by_price[: MOST_DEVICES // 4]}
    if len(kept) == len(network.names):  # memory asks for all of them
        return problem
    return problem.on(problem.fleet.subset(name for name in network.names if name in kept))


def _promising(network: FleetNetwork, blocks: Blocks) -> set[int]:
    share = MOST_DEVICES // (1 + HUBS)
    kept: set[int] = set(np.argsort(-network.speed, kind="stable")[:share].tolist())
    for hub in _hubs(network, share):
        back_s = blocks.work[-1] / network.speed + _message_s(network, blocks, hub)
        soonest = (int(d) for d in np.argsort(back_s, kind="stable") if int(d) not in kept)
        kept.update(d for d, _ in zip(soonest, range(share), strict=False))
    need = ROOM * (sum(v.owned_bytes for v in blocks.variables) + float(blocks.saved[-1]))
    for device in np.argsort(-network.memory, kind="stable").tolist():
        if float(network.memory[list(kept)].sum()) >= need:
            break
        kept.add(device)
    return kept


def _hubs(network: FleetNetwork, share: int) -> Iterator[int]:
    """The fastest device of all, and those of the kinds whose `share` fastest devices are fastest in sum."""
    members = [np.flatnonzero(network.kind == k) for k in range(len(network.kind_latency))]
    joint = [float(np.sort(network.speed[m])[-share:].sum()) for m in members]
    fastest = int(network.speed.argmax())
    best = [int(m[network.speed[m].argmax()]) for _, m in sorted(zip(joint, members, strict=True), key=lambda p: -p[0])]
    yield from list(dict.fromkeys([fastest, *best]))[:HUBS]


def _message_s(network: FleetNetwork, blocks: Blocks, hub: int) -> Floats:
    """[devices]: a micro-batch's message from the hub to each and back; the quartile of the places to cut."""
    sizes = sorted(blocks.live_bytes[boundary] / 2 for boundary in range(1, blocks.count)) or [0.0]
    size, here = sizes[len(sizes) // 4], int(network.kind[hub])
    there = network.kind_latency[here] + size * network.kind_byte_s[here]
    back = network.kind_latency[:, here] + size * network.kind_byte_s[:, here]
    found = (there + back)[network.kind]
    found[hub] = 0.0
    return found
