"""The fleet as arrays, for planners that look at every pair of devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isthmus.cost.kernel import Bools, Floats, Ints
from isthmus.cost.price import GB, SECONDS_PER_HOUR
from isthmus.cost.problem import Problem
from isthmus.fleet import Fleet


@dataclass(frozen=True)
class FleetNetwork:
    """Devices by number, in fleet order.

    Links are kept between kinds of devices: a region is one, and a device that the fleet's links name is one of its
    own. So ten thousand devices in 64 regions are two small matrices, and two large ones only for who asks for them.
    """

    names: tuple[str, ...]
    speed: Floats  # FLOP/s, scaled by lambda
    memory: Floats  # bytes that plans may use
    kind: Ints  # [devices]: row in the two matrices below
    kind_latency: Floats
    """[source, target] seconds; the diagonal joins two devices of one kind, and is infinite where there is only one."""
    kind_byte_s: Floats  # [source, target] seconds per byte: 1 / bandwidth
    rate: Floats  # [devices]: money per second
    region: Ints  # [devices]
    byte_price: Floats  # [devices]: money per byte that leaves the device's region
    uplinks: tuple[tuple[Bools, float], ...]  # of sites that share one: its devices, and bytes per second

    @cached_property
    def egress(self) -> Floats:
        """[source, target] money per byte between devices."""
        return self.byte_price[:, None] * (self.region[:, None] != self.region)

    @cached_property
    def latency(self) -> Floats:
        """[source, target] seconds between devices; zero on the diagonal."""
        return self._between_devices(self.kind_latency)

    @cached_property
    def byte_s(self) -> Floats:
        """[source, target] seconds per byte between devices; zero on the diagonal."""
        return self._between_devices(self.kind_byte_s)

    def _between_devices(self, matrix: Floats) -> Floats:
        found = matrix[np.ix_(self.kind, self.kind)]
        np.fill_diagonal(found, 0.0)
        return found


def network_of(problem: Problem) -> FleetNetwork:
    fleet = problem.fleet
    kind, latency, bandwidth = link_kinds(fleet)
    return FleetNetwork(
        names=fleet.names,
        speed=np.array([d.sustained_flops_per_s for d in fleet.devices]),
        memory=np.array([float(problem.offered_bytes(name)) for name in fleet.names]),
        kind=kind,
        kind_latency=latency,
        kind_byte_s=np.divide(1.0, bandwidth, out=np.full_like(bandwidth, np.inf), where=bandwidth > 0),
        rate=np.array([d.price_per_hour for d in fleet.devices]) / SECONDS_PER_HOUR,
        region=np.unique([d.region for d in fleet.devices], return_inverse=True)[1].reshape(-1),
        byte_price=np.array([fleet.region_info_of(d.region).egress_price_per_gb for d in fleet.devices]) / GB,
        uplinks=tuple(
            (np.array([device.region == site.region for device in fleet.devices]), site.uplink_bytes_per_s)
            for site in fleet.region_info
            if site.uplink_bytes_per_s is not None
        ),
    )


def link_kinds(fleet: Fleet) -> tuple[Ints, Floats, Floats]:
    """Kind of each device; latency and bandwidth between kinds, infinite and 0 inside a kind of one device."""
    named = {name for route in fleet.links.devices for name in (route.source, route.target)}
    members: dict[str, list[str]] = {}
    for device in fleet.devices:
        members.setdefault(device.name if device.name in named else device.region, []).append(device.name)
    row = {name: k for k, names in enumerate(members.values()) for name in names}
    latency, bandwidth = np.full((len(members), len(members)), np.inf), np.zeros((len(members), len(members)))
    for a, sources in enumerate(members.values()):
        for b, targets in enumerate(members.values()):
            if a != b or len(sources) > 1:
                link = fleet.link(sources[0], targets[-1])
                latency[a, b], bandwidth[a, b] = link.latency_s, link.bandwidth_bytes_per_s
    return np.array([row[name] for name in fleet.names], dtype=np.int64), latency, bandwidth
