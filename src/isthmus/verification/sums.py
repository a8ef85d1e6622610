"""Seconds of the sums that replicas make, computed apart from the planners' cost model.

A buffer of E elements is cut into n parts; part k is elements E k // n up to E (k + 1) // n. A round lasts as long as
its slowest message, or as a site's uplink takes for all that leaves the site; a sum lasts all its rounds; and nothing
is over before every link has carried all that crosses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.fleet import Fleet
from isthmus.plans import Collective, ReplicaSync, SyncGroup
from isthmus.verification.cutting import CutGraph
from isthmus.verification.question import FLOAT32_BYTES

Sent = list[tuple[str, str, float]]  # source, target and bytes of each message of a round
Members = tuple[tuple[str, ...], tuple[int, ...]]
"""Devices, and the stages that sum on them, as a plan's groups have them."""


def averaging_groups(replicas: Sequence[tuple[Sequence[str], CutGraph]]) -> dict[Members, list[str]]:
    """The parameters that each set of stages sums, in the order of the replicas; stages are distinguished where a
    device has several."""
    found: dict[Members, list[str]] = {}
    several = any(len(set(devices)) < len(devices) for devices, _ in replicas)
    for parameter in replicas[0][1].owners if len(replicas) > 1 else ():
        stages = tuple(graph.owners[parameter][0] for _, graph in replicas)
        members = tuple(devices[stage] for stage, (devices, _) in zip(stages, replicas, strict=True))
        found.setdefault((members, stages if several else ()), []).append(parameter)
    return found


def buffer_bytes(graph: CutGraph, parameters: Sequence[str], averages: str) -> int:
    """float32 elements; with gradients go one number per parameter and the count of the loss."""
    elements = sum(graph.owners[name][1] for name in parameters)
    return FLOAT32_BYTES * (elements + (len(parameters) + 1 if averages == "gradients" else 0))


def well_formed(group: SyncGroup, proven: Fleet | None) -> bool:
    """Return whether the collective's islands are the group's members, each once; where something is `proven` of plans
    on a fleet, also whether they are its regions, two or more: a single leader waits for nobody after its backward."""
    islands, kind = group.collective.islands, group.collective.kind
    expected = [] if kind == "sharded" else list(range(len(group.devices)))
    if sorted(m for island in islands for m in island) != expected or not all(islands):
        return False
    if kind == "hierarchical" and proven is not None:
        homes = [{proven.device(group.devices[m]).region for m in island} for island in islands]
        return 1 < len(homes) == len(set().union(*homes)) and all(len(some) == 1 for some in homes)
    return kind != "ring" or len(islands) == 1


def sums_s(fleet: Fleet, sync: ReplicaSync) -> float:
    """The mean over the steps of a period."""
    total_s = 0.0
    for step in range(sync.period):
        carried_s: dict[tuple[str, str], float] = {}
        longest_s = 0.0
        for group in sync.groups:
            if step in group.iterations:
                turns = list(rounds_of(group))
                longest_s = max(longest_s, sum(_round_s(fleet, sent) for sent in turns))
                for a, b, size in (message for sent in turns for message in sent):
                    rate = fleet.link(a, b).bandwidth_bytes_per_s
                    carried_s[a, b] = carried_s.get((a, b), 0.0) + size / rate
        crossed_s = (seconds + fleet.link(a, b).latency_s for (a, b), seconds in carried_s.items())
        total_s += max([longest_s, *crossed_s])
    return total_s / sync.period


def rounds_of(group: SyncGroup) -> Iterator[Sent]:
    """The messages of one sum, round by round."""
    return _rounds(group.collective, group.devices, group.size_bytes // FLOAT32_BYTES)


def _round_s(fleet: Fleet, sent: Sent) -> float:
    slowest_s, left_s = 0.0, dict[str, float]()
    for a, b, size in sent:
        link = fleet.link(a, b)
        slowest_s = max(slowest_s, link.latency_s + size / link.bandwidth_bytes_per_s)
        home, away = fleet.device(a).region, fleet.device(b).region
        rate = fleet.region_info_of(home).uplink_bytes_per_s
        if home != away and rate is not None:
            left_s[home] = left_s.get(home, 0.0) + size / rate
    return max([slowest_s, *left_s.values()])


def _rounds(collective: Collective, devices: Sequence[str], elements: int) -> Iterator[Sent]:
    if len(devices) < 2:
        return
    if collective.kind == "ring":
        ring = [devices[m] for m in collective.islands[0]]
        parts = _parts(len(ring), elements)
        for turn in range(2 * len(ring) - 2):
            yield [(d, ring[(k + 1) % len(ring)], parts[(k - turn) % len(ring)]) for k, d in enumerate(ring)]
        return
    islands = collective.islands if collective.kind == "hierarchical" else tuple((m,) for m in range(len(devices)))
    leaders = [devices[island[0]] for island in islands]
    inside = [(devices[m], devices[island[0]]) for island in islands for m in island[1:]]
    parts = _parts(len(leaders), elements)
    if collective.kind == "hierarchical":
        yield [(member, leader, FLOAT32_BYTES * elements) for member, leader in inside]
    yield [(a, b, parts[k]) for a in leaders for k, b in enumerate(leaders) if a != b]
    yield [(a, b, parts[k]) for k, a in enumerate(leaders) for b in leaders if a != b]
    if collective.kind == "hierarchical":
        yield [(leader, member, FLOAT32_BYTES * elements) for member, leader in inside]


def _parts(count: int, elements: int) -> dict[int, float]:
    return {k: FLOAT32_BYTES * (elements * (k + 1) // count - elements * k // count) for k in range(count)}
