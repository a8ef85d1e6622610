"""The sums of replicas: their groups, their collectives and their times.

Replicas may be cut differently, so a device can average one part of its stage with one set of devices and the rest with
another. Each such set is a group; its members exchange in rounds (`plan.collective`), by whichever collective is the
fastest on the links between them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from isthmus.cost.problem import FLOAT32_BYTES, SyncPolicy
from isthmus.cost.stage_costs import elements, trainable, uplinks_s
from isthmus.fleet import Fleet
from isthmus.graph import Flow, StageGraph
from isthmus.plans import Averages, Collective, Constraints, ReplicaSync, SyncGroup
from isthmus.plans.collective import rounds
from isthmus.plans.exchanges import FragmentSchedule

MOST_ORDERED = 5  # members up to which every order of a ring is tried


Holders = Sequence[tuple[Sequence[str], Sequence[StageGraph]]]  # each replica's devices and stages


class GroupMembers(NamedTuple):
    """The devices that sum a parameter: as a `SyncGroup` has it."""

    devices: tuple[str, ...]
    stages: tuple[int, ...] = ()


def replica_sync(flow: Flow, fleet: Fleet, policy: SyncPolicy, replicas: Holders) -> ReplicaSync:
    """Return the sums under a policy. `dream` begins as `partial`: its planner moves parameters between steps."""
    if len(replicas) < 2:
        return ReplicaSync()
    held, period = owners(replicas), policy.every
    if policy.mode == "every-step":
        return grouped(flow, fleet, {name: (members, (0,)) for name, members in held.items()}, "gradients", 1)
    steps = _steps(policy, len(held))
    dated = {name: (members, (step,)) for (name, members), step in zip(held.items(), steps, strict=True)}
    if policy.outer is None:
        return grouped(flow, fleet, dated, "parameters", period)
    return msgspec.structs.replace(grouped(flow, fleet, dated, "deltas", period), outer=policy.outer)


def copies_sync(flow: Flow, fleet: Fleet, constraints: Constraints, stages: Sequence[StageGraph]) -> ReplicaSync:
    """Return the sums between copies of a chain's first stage in every step, and where labels stay of its last."""
    groups: list[SyncGroup] = []
    for number in sorted({0, len(stages) - 1} if constraints.labels_stay else {0}):
        stage = stages[number]
        names = [op.name for op in stage.variables() if trainable(op) and op.name not in stage.shared_from]
        summed = grouped(
            flow, fleet, dict.fromkeys(names, (GroupMembers(constraints.feeders), (0,))), "gradients", 1
        ).groups
        groups += [msgspec.structs.replace(group, stages=(number,) * len(group.devices)) for group in summed]
    return ReplicaSync(groups=tuple(groups))


def _steps(policy: SyncPolicy, count: int) -> list[int]:
    """In which step of a period each of so many parameters is averaged."""
    period = policy.every
    if policy.mode in ("partial", "dream", "dreamddp"):
        return [number * period // count for number in range(count)]
    whole = FragmentSchedule(period=period, count=1)
    schedule = FragmentSchedule.streaming(layers=count, period=period) if policy.mode == "streaming" else whole
    return [schedule.step_of(schedule.fragment_of(number)) for number in range(count)]


def owners(replicas: Holders) -> dict[str, GroupMembers]:
    """Return each trainable parameter's owners in all replicas; in the graph's order of the first replica."""
    several = any(len(set(devices)) < len(devices) for devices, _ in replicas)
    found = [
        {
            op.name: (device, number)
            for number, (device, stage) in enumerate(zip(devices, stages, strict=True))
            for op in stage.variables()
            if trainable(op) and op.name not in stage.shared_from
        }
        for devices, stages in replicas
    ]
    held = {name: [owner[name] for owner in found] for name in found[0]}
    return {
        name: GroupMembers(tuple(device for device, _ in each), tuple(number for _, number in each) if several else ())
        for name, each in held.items()
    }


def grouped(
    flow: Flow,
    fleet: Fleet,
    parameters: Mapping[str, tuple[GroupMembers, tuple[int, ...]]],
    averages: Averages,
    period: int,
) -> ReplicaSync:
    """Parameters with the same members and iterations make one group, summed by the fastest collective."""
    names: defaultdict[tuple[GroupMembers, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, key in parameters.items():
        names[key].append(name)
    return ReplicaSync(
        averages=averages,
        period=period,
        groups=tuple(
            fastest(
                fleet,
                SyncGroup(
                    devices=members.devices,
                    stages=members.stages,
                    parameters=tuple(held),
                    iterations=iterations,
                    size_bytes=buffer_bytes(flow, held, averages),
                ),
            )
            for (members, iterations), held in names.items()
        ),
    )


def buffer_bytes(flow: Flow, parameters: Sequence[str], averages: Averages) -> int:
    """See `SyncGroup.size_bytes`."""
    extra = len(parameters) + 1 if averages == "gradients" else 0
    return FLOAT32_BYTES * (sum(elements(flow.by_name[name]) for name in parameters) + extra)


def fastest(fleet: Fleet, group: SyncGroup) -> SyncGroup:
    """The same group with the collective that takes it least; of equally fast ones the simplest."""
    made = (msgspec.structs.replace(group, collective=collective) for collective in _collectives(fleet, group.devices))
    return min(made, key=lambda g: sum_time(fleet, g).alone_s)


def _collectives(fleet: Fleet, devices: Sequence[str]) -> Iterator[Collective]:
    yield Collective()
    if len(devices) > 2:
        yield Collective(kind="ring", islands=(_ring(fleet, devices),))
    islands: defaultdict[str, list[int]] = defaultdict(list)
    for member, device in enumerate(devices):
        islands[fleet.device(device).region].append(member)
    if 1 < len(islands) < len(devices):
        outside = [[m for m in range(len(devices)) if m not in island] for island in islands.values()]
        led = (_led(fleet, devices, island, far) for island, far in zip(islands.values(), outside, strict=True))
        yield Collective(kind="hierarchical", islands=tuple(led))


def _led(fleet: Fleet, devices: Sequence[str], island: Sequence[int], far: Sequence[int]) -> tuple[int, ...]:
    """The island's members, the one with the best worst link to those outside first."""

    def worst(member: int) -> float:
        ends = [(devices[member], devices[other]) for other in far]
        return min(fleet.link(a, b).bandwidth_bytes_per_s for x in ends for a, b in (x, x[::-1]))

    first = max(island, key=worst)
    return first, *(m for m in island if m != first)


def _ring(fleet: Fleet, devices: Sequence[str]) -> tuple[int, ...]:
    """The members in an order whose slowest hop is fast: the best for few, always to the nearest left for many."""

    def hop_s(a: int, b: int) -> float:
        return fleet.link(devices[a], devices[b]).transfer_s(1)

    rest = range(1, len(devices))
    if len(devices) <= MOST_ORDERED:
        return min(
            ((0, *order) for order in itertools.permutations(rest)),
            key=lambda order: max(hop_s(a, b) for a, b in itertools.pairwise((*order, 0))),
        )
    left, order = set(rest), [0]
    while left:
        order.append(min(left, key=lambda m: (hop_s(order[-1], m), m)))
        left.remove(order[-1])
    return tuple(order)


class SumTime(NamedTuple):
    alone_s: float
    links: Mapping[tuple[str, str], tuple[float, float]]
    """Seconds that its bytes occupy each link, and the link's latency."""


def sync_s(fleet: Fleet, sync: ReplicaSync) -> float:
    """Seconds of all sums, the mean over the steps of a period."""
    times = [sum_time(fleet, group) for group in sync.groups]
    due = (
        [time for group, time in zip(sync.groups, times, strict=True) if iteration in group.iterations]
        for iteration in range(sync.period)
    )
    return sum(map(together_s, due)) / sync.period


def together_s(times: Iterable[SumTime]) -> float:
    """Return the time of a step's sums: no group is faster than its own rounds, no link than all that crosses it."""
    longest_s, loads = 0.0, defaultdict[tuple[str, str], float](float)
    for time in times:
        longest_s = max(longest_s, time.alone_s)
        for ends, (busy_s, latency_s) in time.links.items():
            loads[ends] = (loads[ends] or latency_s) + busy_s
    return max(longest_s, *loads.values(), 0.0)


def sum_time(fleet: Fleet, group: SyncGroup) -> SumTime:
    """The rounds one after another, each as long as its slowest message; what leaves a site shares its uplink."""
    total_s, links = 0.0, dict[tuple[str, str], tuple[float, float]]()
    for sent in messages(group):
        slowest_s = 0.0
        for a, b, size in sent:
            link = fleet.link(a, b)
            slowest_s = max(slowest_s, link.transfer_s(size))
            links[a, b] = links.get((a, b), (0.0,))[0] + size / link.bandwidth_bytes_per_s, link.latency_s
        total_s += max(slowest_s, *uplinks_s(fleet, sent).values(), 0.0)
    return SumTime(total_s, links)


def messages(group: SyncGroup) -> Iterator[list[tuple[str, str, int]]]:
    """(source, target, bytes) of everything that one sum sends, round by round."""
    count = group.size_bytes // FLOAT32_BYTES
    for turn in zip(*rounds(group.collective, len(group.devices)), strict=True):
        yield [
            (group.devices[member], group.devices[m.other], FLOAT32_BYTES * m.parts.count(count))
            for member, its in enumerate(turn)
            for m in its.sends
        ]
