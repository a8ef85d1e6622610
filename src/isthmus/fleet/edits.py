"""A fleet with one thing more, less, faster or larger: what would be bought, or lost.

Every function returns a new fleet and raises `UserError` for a name that the fleet does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

import msgspec

from isthmus.errors import UserError, unknown_name
from isthmus.fleet.fleet import Device, Fleet
from isthmus.fleet.links import Link, Links, LinkTrace, Route

PROBED_BYTES = 2**20  # bytes of the message by which links are compared


def with_another_device(fleet: Fleet, name: str, region: str | None = None, count: int = 1) -> Fleet:
    """`count` more devices like `name`, in its region or in another one of the fleet. In its own region each has the
    links of `name`, and to `name` the link inside the region, or else the slowest link of `name`."""
    like = fleet.device(name)
    if region is not None and region not in fleet.regions:
        raise unknown_name("region", region, fleet.regions)
    for _ in range(count):
        fleet = _with_copy(fleet, like, region or like.region)
    return fleet


def _with_copy(fleet: Fleet, like: Device, region: str) -> Fleet:
    copy = msgspec.structs.replace(like, name=_free_name(fleet, like.name), region=region)
    routes = list(fleet.links.devices)
    if region == like.region:
        routes += _same_routes(fleet.links.devices, like.name, copy.name)
        if fleet.region_link(region, region) is None and len(fleet.devices) > 1:  # stated by pairs of devices
            slowest = _slowest(fleet, like.name)
            routes += [Route(like.name, copy.name, slowest), Route(copy.name, like.name, slowest)]
    links = msgspec.structs.replace(fleet.links, devices=tuple(routes))
    return msgspec.structs.replace(fleet, devices=(*fleet.devices, copy), links=links)


def with_another_region(fleet: Fleet, region: str) -> Fleet:
    """A copy of `region` with its links to the others. Both are joined by the slowest of these links."""
    members = [device for device in fleet.devices if device.region == region]
    others = [other for other in fleet.regions if other != region]
    if not members:
        raise unknown_name("region", region, fleet.regions)
    if not others:
        raise UserError(f"region {region!r}: it is the only one, so no link is known that leaves it")
    name = _free_name(fleet, region)
    names = {device.name: _free_name(fleet, device.name) for device in members}
    copies = [msgspec.structs.replace(device, name=names[device.name], region=name) for device in members]
    inside = [r for r in fleet.links.devices if r.source in names and r.target in names]
    outside = [r for r in fleet.links.devices if (r.source in names) != (r.target in names)]
    routes = [Route(names[r.source], names[r.target], r.link) for r in inside]
    routes += [Route(names.get(r.source, r.source), names.get(r.target, r.target), r.link) for r in outside]
    regions = _same_routes(fleet.links.regions, region, name)
    if (own := fleet.region_link(region, region)) is not None:
        regions.append(Route(name, name, own))
    slowest = _slowest(fleet, members[0].name, {device.name for device in members})
    regions += [Route(region, name, slowest), Route(name, region, slowest)]
    links = msgspec.structs.replace(
        fleet.links, regions=(*fleet.links.regions, *regions), devices=(*fleet.links.devices, *routes)
    )
    info = tuple(msgspec.structs.replace(i, region=name) for i in fleet.region_info if i.region == region)
    return msgspec.structs.replace(
        fleet, devices=(*fleet.devices, *copies), links=links, region_info=(*fleet.region_info, *info)
    )


def without(fleet: Fleet, name: str) -> Fleet:
    """Without a device, or without all devices of a region."""
    gone = fleet.located(name)
    if len(gone) == len(fleet.devices):
        raise UserError(f"without {name!r}: no device would be left")
    return fleet.subset(device for device in fleet.names if device not in gone)


def with_links(fleet: Fleet, a: str, b: str, *, bandwidth: float = 1.0, latency: float = 1.0) -> Fleet:
    """The links between two devices or regions scaled, both ways; of a region and itself, those inside of it. A shared
    uplink stays as it is."""
    left, right = set(fleet.located(a)), set(fleet.located(b))

    def scaled(route: Route) -> Route:
        found = scaled_link(route.link, bandwidth=bandwidth, latency=latency)
        return Route(route.source, route.target, found)

    def between(route: Route) -> bool:
        return (route.source in left and route.target in right) or (route.source in right and route.target in left)

    if a in fleet.regions and b in fleet.regions:
        devices = [scaled(route) if between(route) else route for route in fleet.links.devices]
        pairs = dict.fromkeys(((a, b), (b, a)))
        kept = [route for route in fleet.links.regions if (route.source, route.target) not in pairs]
        stated = [Route(x, y, link) for x, y in pairs if (link := fleet.region_link(x, y)) is not None]
        links = _links(fleet, regions=[*kept, *map(scaled, stated)], devices=devices)
    else:
        if left == right:
            raise UserError(f"link: got {a!r} twice, expected two devices or regions")
        bare = msgspec.structs.replace(fleet, region_info=())
        pairs = dict.fromkeys((x, y) for p in left for q in right if p != q for x, y in ((p, q), (q, p)))
        kept = [route for route in fleet.links.devices if (route.source, route.target) not in pairs]
        links = _links(fleet, devices=[*kept, *(scaled(Route(x, y, bare.link(x, y))) for x, y in sorted(pairs))])
    return msgspec.structs.replace(fleet, links=links)


def scaled_link(link: Link, *, bandwidth: float = 1.0, latency: float = 1.0) -> Link:
    """With its trace."""
    trace = link.trace
    if trace is not None:
        trace = LinkTrace(
            trace.times_s,
            tuple(latency * s for s in trace.latency_s),
            tuple(bandwidth * b for b in trace.bandwidth_bytes_per_s),
        )
    return Link(latency * link.latency_s, bandwidth * link.bandwidth_bytes_per_s, trace)


def with_uplink(fleet: Fleet, region: str, factor: float) -> Fleet:
    """The shared uplink of a region scaled. UserError where it has none."""
    info = fleet.region_info_of(region)
    if region not in fleet.regions:
        raise unknown_name("region", region, fleet.regions)
    if info.uplink_bytes_per_s is None:
        raise UserError(f"uplink {region!r}: the fleet limits none there")
    wider = msgspec.structs.replace(info, uplink_bytes_per_s=factor * info.uplink_bytes_per_s)
    return msgspec.structs.replace(
        fleet, region_info=tuple(wider if found.region == region else found for found in fleet.region_info)
    )


def with_speed(fleet: Fleet, names: Container[str], factor: float) -> Fleet:
    """Devices that compute `factor` times as fast, in every precision."""
    return _with_devices(
        fleet,
        [
            msgspec.structs.replace(d, scale=factor * d.scale, half_flops_per_s=factor * d.half_flops_per_s)
            if d.name in names
            else d
            for d in fleet.devices
        ],
    )


def with_memory_scaled(fleet: Fleet, names: Container[str], factor: float) -> Fleet:
    return _with_devices(
        fleet,
        [
            msgspec.structs.replace(d, memory_bytes=int(factor * d.memory_bytes)) if d.name in names else d
            for d in fleet.devices
        ],
    )


def _free_name(fleet: Fleet, name: str) -> str:
    taken, number, found = {*fleet.names, *fleet.regions}, 1, f"new-{name}"
    while found in taken:
        number += 1
        found = f"new-{name}-{number}"
    return found


def _slowest(fleet: Fleet, name: str, inside: Collection[str] = ()) -> Link:
    """Return the slowest of the links from a device to those that are not `inside`."""
    links = [fleet.link(name, other) for other in fleet.names if other != name and other not in inside]
    return max(links, key=lambda link: link.transfer_s(PROBED_BYTES))


def _with_devices(fleet: Fleet, devices: list[Device]) -> Fleet:
    return msgspec.structs.replace(fleet, devices=tuple(devices))


def _links(fleet: Fleet, *, devices: list[Route], regions: list[Route] | None = None) -> Links:
    kept = fleet.links.regions if regions is None else tuple(regions)
    return msgspec.structs.replace(fleet.links, regions=kept, devices=tuple(devices))


def _same_routes(routes: Iterable[Route], old: str, new: str) -> list[Route]:
    """The routes of one end, for another."""
    found: list[Route] = []
    for route in routes:
        if old in (route.source, route.target) and route.source != route.target:
            source, target = (new if end == old else end for end in (route.source, route.target))
            found.append(Route(source, target, route.link))
    return found
