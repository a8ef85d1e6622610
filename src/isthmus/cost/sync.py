"""What averaging the replicas' gradients takes: once per step, after the last backward.

Replicas may be cut differently, so a device can average one part of its stage with one set of devices and the rest with
another. Each such set is a group; its members exchange as a sharded parameter server or around a ring, whichever is
faster. A device works off its groups one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from isthmus.cost.memory import elements, trainable
from isthmus.cost.problem import FLOAT32_BYTES
from isthmus.fleet import Fleet
from isthmus.graph import Flow, StageGraph
from isthmus.plan import SyncGroup


def sync_groups(flow: Flow, replicas: Sequence[tuple[Sequence[str], Sequence[StageGraph]]]) -> tuple[SyncGroup, ...]:
    """The groups of replicas, given each one's devices and stages. Gradients are in float32."""
    if len(replicas) < 2:
        return ()
    owners = [
        {
            op.name: device
            for device, stage in zip(devices, stages, strict=True)
            for op in stage.variables()
            if trainable(op) and op.name not in stage.borrows
        }
        for devices, stages in replicas
    ]
    sizes: dict[tuple[str, ...], int] = {}
    for name in owners[0]:
        group = tuple(owner[name] for owner in owners)
        sizes[group] = sizes.get(group, 0) + FLOAT32_BYTES * elements(flow.by_name[name])
    return tuple(SyncGroup(devices=devices, size_bytes=size) for devices, size in sizes.items())


def sync_s(fleet: Fleet, groups: Sequence[SyncGroup]) -> float:
    """Seconds until the last device has averaged with all its groups."""
    busy: dict[str, float] = {}
    for group in groups:
        ring = ring_s(fleet, group)
        for device in group.devices:
            busy[device] = busy.get(device, 0.0) + min(ring, sharded_s(fleet, group, device))
    return max(busy.values(), default=0.0)


def sharded_s(fleet: Fleet, group: SyncGroup, device: str) -> float:
    """DT-FM Eq. 2 for one member: a shard to and from each other, sum of 2 (alpha + size / (n beta)).

    Both directions of a pair count as they are, not as their mean.
    """
    shard = group.size_bytes / len(group.devices)
    others = [other for other in group.devices if other != device]
    return sum(
        fleet.link(a, b).transfer_s(shard) for other in others for a, b in ((device, other), (other, device))
    )


def ring_s(fleet: Fleet, group: SyncGroup) -> float:
    """2 (n - 1) rounds, each as long as the slowest hop between neighbours, in the group's order."""
    count = len(group.devices)
    if count < 2:
        return 0.0
    hops = itertools.pairwise((*group.devices, group.devices[0]))
    return 2 * (count - 1) * max(fleet.link(a, b).transfer_s(group.size_bytes / count) for a, b in hops)
