"""Which devices train one replica, by the job."""

from __future__ import annotations

from collections import Counter

from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.job import Job

Groups = dict[str, tuple[str, ...]]
"""The devices of each replica in the fleet's order, by its name. A replica of one device has that device's name."""
FIELD = "sync.decoupled.replicas"


def replica_groups(job: Job, fleet: Fleet) -> Groups:
    """In the order of the fleet's devices. UserError for lists that are not a partition of the fleet."""
    asked = job.sync.decoupled.replicas
    if asked == "devices":
        return {name: (name,) for name in fleet.names}
    if asked == "regions":
        found: dict[str, list[str]] = {}
        for device in fleet.devices:
            found.setdefault(device.region, []).append(device.name)
        return {_name(devices, region): tuple(devices) for region, devices in found.items()}
    named = Counter(name for group in asked for name in group)
    for name, count in named.items():
        if name not in fleet.names:
            raise UserError(f"{FIELD}: {unknown_name('device', name, fleet.names)}")
        if count > 1:
            raise UserError(f"{FIELD}: got {name!r} {count} times, expected each device once")
    if missing := [name for name in fleet.names if name not in named]:
        raise UserError(f"{FIELD}: got no replica for {', '.join(missing)}, expected each device in one")
    if not all(asked):
        raise UserError(f"{FIELD}: got an empty list, expected at least one device in each")
    groups = sorted((sorted(group, key=fleet.names.index) for group in asked), key=lambda g: fleet.names.index(g[0]))
    return {_name(group, "+".join(group)): tuple(group) for group in groups}


def _name(devices: list[str], several: str) -> str:
    return several if len(devices) > 1 else devices[0]
