"""Devices, and the directed link between every pair of them.

The links of a fleet are kept as people state them, from the general to the particular: one default, one for devices
that share a region, one per pair of regions, one per pair of devices. The particular overrides the general. So a
thousand devices in eight regions are 64 routes, and a link is found with at most two dictionary look-ups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, zip_longest

import msgspec
import numpy as np

from isthmus.engines import EngineName, check_engine
from isthmus.errors import UserError, unknown_name
from isthmus.fleet.links import Link, Links, Region, Route, check_label, check_number


class Measurement(msgspec.Struct, frozen=True):
    """One result of a probe of a device, in words: `what` is as "products in fp32"."""

    what: str
    flops_per_s: float


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One place that computes: a GPU, a CPU, or a whole island behind one name.

    `flops_per_s` is the speed as stated: of a data sheet, a paper or a benchmark. Training reaches
    `sustained_flops_per_s`, which is `scale` times as much (FusionLLM's lambda: S = lambda S*); plans go by that.
    `hardware` is for people: what it is, and which of a machine's, as "NVIDIA H200 (cuda:0)". Memory is in bytes, the
    price in any currency per hour. Raises `UserError` for a name that is not a label, or a number out of range.

    >>> import isthmus
    >>> desk = isthmus.Device(name="desk", region="lab", flops_per_s=20e12, memory_bytes=24 << 30, scale=0.5)
    >>> desk.sustained_flops_per_s
    10000000000000.0
    """

    name: str
    region: str
    flops_per_s: float
    memory_bytes: int
    price_per_hour: float = 0.0
    hardware: str = ""
    scale: float = 1.0
    half_flops_per_s: float = 0.0
    """The speed that training reaches in bf16 or fp16; 0 where it is not known: `sustained_flops_per_s` counts then
    too."""
    host_bytes_per_s: float = 0.0
    """Between an accelerator and the host's memory, the slower way; 0 where nothing is copied, or not known. For
    people: copies run in the background."""
    measured: tuple[Measurement, ...] = ()
    """The measurements that the speeds above come from, and what was measured beside it."""
    engine: EngineName = "torch"  # The framework that computes its stages.

    def __post_init__(self) -> None:
        check_label("device name", self.name)
        check_label(f"device {self.name!r}: region", self.region)
        if self.hardware:
            check_label(f"device {self.name!r}: hardware", self.hardware)
        check_number(f"device {self.name!r}: flops_per_s", self.flops_per_s, above_zero=True)
        check_number(f"device {self.name!r}: scale", self.scale, above_zero=True)
        check_number(f"device {self.name!r}: compute times scale", self.sustained_flops_per_s, above_zero=True)
        check_number(f"device {self.name!r}: memory_bytes", self.memory_bytes, above_zero=True)
        check_number(f"device {self.name!r}: price_per_hour", self.price_per_hour)
        check_number(f"device {self.name!r}: half_flops_per_s", self.half_flops_per_s)
        check_number(f"device {self.name!r}: host_bytes_per_s", self.host_bytes_per_s)
        check_engine(f"device {self.name!r}: engine", self.engine)
        for measurement in self.measured:
            check_label(f"device {self.name!r}: measured", measurement.what)
            check_number(f"device {self.name!r}: measured {measurement.what}", measurement.flops_per_s, above_zero=True)

    @property
    def sustained_flops_per_s(self) -> float:
        """FLOP/s in training: `scale` times the peak."""
        return self.scale * self.flops_per_s

    @property
    def price_per_flop(self) -> float:
        """For comparisons: of an hour, over FLOP/s."""
        return self.price_per_hour / self.sustained_flops_per_s


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Devices, and a link for every ordered pair of different devices.

    Raises `UserError` for an empty fleet, a name used twice, a route or a site of no device, or a pair without a link.
    JSON in and out is `msgspec.json.decode(data, type=Fleet)` and `msgspec.json.encode(fleet)`.

    >>> import isthmus
    >>> from isthmus.fleet import Links
    >>> devices = tuple(
    ...     isthmus.Device(name=name, region="lab", flops_per_s=1e12, memory_bytes=8 << 30) for name in ("desk", "rack")
    ... )
    >>> link = isthmus.Link(latency_s=0.001, bandwidth_bytes_per_s=125e6)
    >>> fleet = isthmus.Fleet(name="lab", devices=devices, links=Links(default=link))
    >>> fleet.names
    ('desk', 'rack')
    """

    name: str
    devices: tuple[Device, ...]
    links: Links
    region_info: tuple[Region, ...] = ()  # Regions whose uplink is shared, or whose outgoing bytes cost money.
    description: str = ""

    def __post_init__(self) -> None:
        check_label("fleet name", self.name)
        if self.description and not self.description.isprintable():
            raise UserError(f"fleet {self.name!r}: description: got {self.description!r}, expected one line of text")
        if not self.devices:
            raise UserError(f"fleet {self.name!r}: got no device, expected at least one")
        self._check_names()
        self._check_routes("device", self.names, self.links.devices)
        self._check_routes("region", self.regions, self.links.regions)
        self._check_every_pair()
        self._check_sites()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The devices' names, in the order in which they were declared."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """The regions' names, in the order in which they first appear."""
        return tuple(dict.fromkeys(device.region for device in self.devices))

    def device(self, name: str) -> Device:
        """The device called `name`. Raises `UserError` with the nearest name."""
        try:
            return self._by_name[name]
        except KeyError:
            raise unknown_name("device", name, self.names) from None

    def located(self, name: str) -> tuple[str, ...]:
        """The device of this name, or all devices of the region of this name. Raises `UserError` for neither."""
        if name in self._by_name:
            return (name,)
        if name not in self.regions:
            raise unknown_name("device or region", name, (*self.names, *self.regions))
        return tuple(device.name for device in self.devices if device.region == name)

    def link(self, source: str, target: str) -> Link:
        """The link from one device to another, no faster than the uplink of its site.

        Raises `UserError` for an unknown name or a device and itself.
        """
        link = self._device_routes.get((source, target))
        if link is None:
            if source == target:
                raise UserError(f"fleet {self.name!r}: got a link from {source!r} to itself, expected two devices")
            link = self.region_link(self.device(source).region, self.device(target).region)
            assert link is not None, "every pair was checked when the fleet was made"
        site = self.uplink(source, target) if self.region_info else None
        if site is None or site.uplink_bytes_per_s is None or link.bandwidth_bytes_per_s <= site.uplink_bytes_per_s:
            return link
        return msgspec.structs.replace(link, bandwidth_bytes_per_s=site.uplink_bytes_per_s)

    def line_bytes_per_s(self, device: str) -> float:
        """Into the device, from the fastest of the others; infinite where it is alone. It stands for the way to the
        coordinator, of which a fleet says nothing."""
        links = [self.link(other, device) for other in self.names if other != device]
        return max((link.bandwidth_bytes_per_s for link in links), default=math.inf)

    def region_link(self, source: str, target: str) -> Link | None:
        """The link of devices of these two regions, where no pair of devices has its own. None: pairs state all."""
        link = self._region_routes.get((source, target))
        if link is None and source == target:
            link = self.links.intra
        return self.links.default if link is None else link

    def region_info_of(self, region: str) -> Region:
        """The uplink that the devices of a region share, and its prices; none where the fleet does not say."""
        return self._by_region.get(region) or Region(region=region)

    def uplink(self, source: str, target: str) -> Region | None:
        """The site whose uplink a message between two devices takes; None inside a site or where it is not limited."""
        home = self.device(source).region
        if home == self.device(target).region:
            return None
        site = self.region_info_of(home)
        return site if site.uplink_bytes_per_s is not None else None

    def thin(self, count: int) -> Fleet:
        """`count` of the devices, spread over the regions: one of each region in turn, in declared order.

        The devices kept stay in their declared order, and their links are unchanged.
        Raises `UserError` if `count` is below 1 or above the number of devices.
        """
        if not 1 <= count <= len(self.devices):
            raise UserError(f"fleet {self.name!r}: got {count} devices to keep, expected 1 to {len(self.devices)}")
        members = [[device for device in self.devices if device.region == region] for region in self.regions]
        in_turn = (device for device in chain.from_iterable(zip_longest(*members)) if device is not None)
        return self.subset(device.name for device, _ in zip(in_turn, range(count), strict=False))

    @property
    def engines(self) -> frozenset[str]:
        """The engines of its devices."""
        return frozenset(device.engine for device in self.devices)

    def subset(self, names: Iterable[str]) -> Fleet:
        """The fleet of these devices alone, in their declared order. Raises `UserError` for a name it does not have."""
        kept = {self.device(name).name for name in names}
        devices = tuple(device for device in self.devices if device.name in kept)
        regions = {device.region for device in devices}
        links = msgspec.structs.replace(
            self.links,
            regions=tuple(r for r in self.links.regions if r.source in regions and r.target in regions),
            devices=tuple(r for r in self.links.devices if r.source in kept and r.target in kept),
        )
        sites = tuple(site for site in self.region_info if site.region in regions)
        return msgspec.structs.replace(self, devices=devices, links=links, region_info=sites)

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _by_region(self) -> dict[str, Region]:
        return {site.region: site for site in self.region_info}

    @cached_property
    def _device_routes(self) -> dict[tuple[str, str], Link]:
        return {(route.source, route.target): route.link for route in self.links.devices}

    @cached_property
    def _region_routes(self) -> dict[tuple[str, str], Link]:
        return {(route.source, route.target): route.link for route in self.links.regions}

    def _check_names(self) -> None:
        for name, uses in Counter(self.names).items():
            if uses > 1:
                raise UserError(f"fleet {self.name!r}: {uses} devices are named {name!r}, expected different names")
        # A route's ends are given by name alone, in TOML, so a name must say which of the two it is.
        for name in self.regions:
            if name in self._by_name:
                raise UserError(
                    f"fleet {self.name!r}: {name!r} names a device and a region, "
                    f"expected different names, such as {name + '-0'!r} for the device"
                )

    def _check_routes(self, kind: str, names: tuple[str, ...], routes: tuple[Route, ...]) -> None:
        known, seen = set(names), set[tuple[str, str]]()
        for route in routes:
            pair = (route.source, route.target)
            for name in pair:
                if name not in known:
                    raise unknown_name(f"{kind} in the links of fleet {self.name!r}:", name, names)
            if kind == "device" and route.source == route.target:
                raise UserError(f"fleet {self.name!r}: got a link from {route.source!r} to itself")
            if pair in seen:
                raise UserError(f"fleet {self.name!r}: two links from {kind} {pair[0]!r} to {kind} {pair[1]!r}")
            seen.add(pair)

    def _check_sites(self) -> None:
        for region, uses in Counter(site.region for site in self.region_info).items():
            if region not in self.regions:
                raise unknown_name(f"region in the sites of fleet {self.name!r}:", region, self.regions)
            if uses > 1:
                raise UserError(f"fleet {self.name!r}: {uses} sites for region {region!r}, expected one")

    def _check_every_pair(self) -> None:
        if self.links.default is not None:
            return
        members: dict[str, list[str]] = {region: [] for region in self.regions}
        for device in self.devices:
            members[device.region].append(device.name)
        # By regions, so that a large fleet costs regions squared; devices are looked at only where regions say nothing.
        for a in self.regions:
            for b in self.regions:
                if self.region_link(a, b) is None:
                    self._check_device_pairs(members[a], members[b])

    def _check_device_pairs(self, sources: list[str], targets: list[str]) -> None:
        for source in sources:
            for target in targets:
                if source != target and (source, target) not in self._device_routes:
                    raise UserError(
                        f"fleet {self.name!r}: no link from {source!r} to {target!r}; "
                        "expected one for these devices, for their regions, or a default"
                    )


class FleetChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From a step on, one device or one directed link of an emulated fleet is `factor` times as fast as stated.

    Raises `ValueError`, which a job file's reader turns into a `UserError` with its place, where it names both or
    neither, for a step below 0 and for a factor that is not above 0.
    """

    step: int  # The first step with the change.
    factor: float  # A factor on the device's FLOP/s or the link's bandwidth, as the fleet states them.
    device: str = ""  # A device of the fleet; or a link, in its place.
    link: tuple[str, str] | None = None  # From, to.

    def __post_init__(self) -> None:
        if bool(self.device) == (self.link is not None):
            raise ValueError(f"got device {self.device!r} and link {self.link}, expected one of the two")
        if self.step < 0:
            raise ValueError(f"step: got {self.step}, expected at least 0")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor: got {self.factor}, expected a finite number above 0")


def corrected(
    fleet: Fleet, flops_per_s: Mapping[str, float], bandwidth_bytes_per_s: Mapping[tuple[str, str], float]
) -> Fleet:
    """The fleet with these sustained speeds, by device, and these bandwidths, by source and target; all else as it was.

    Raises `UserError` for an unknown device.
    """
    for name in (*flops_per_s, *(name for pair in bandwidth_bytes_per_s for name in pair)):
        fleet.device(name)
    devices = tuple(
        msgspec.structs.replace(d, scale=flops_per_s[d.name] / d.flops_per_s) if d.name in flops_per_s else d
        for d in fleet.devices
    )
    kept = [r for r in fleet.links.devices if (r.source, r.target) not in bandwidth_bytes_per_s]
    restated = [
        Route(source, target, Link(fleet.link(source, target).latency_s, bandwidth))
        for (source, target), bandwidth in bandwidth_bytes_per_s.items()
    ]
    links = msgspec.structs.replace(fleet.links, devices=(*kept, *restated))
    return msgspec.structs.replace(fleet, devices=devices, links=links)


def in_half(fleet: Fleet) -> Fleet:
    """The fleet as it is for a job that computes in bf16 or fp16: devices whose speed in these is known have it."""
    devices = tuple(
        msgspec.structs.replace(d, scale=d.half_flops_per_s / d.flops_per_s, half_flops_per_s=0.0)
        if d.half_flops_per_s
        else d
        for d in fleet.devices
    )
    return msgspec.structs.replace(fleet, devices=devices)


def with_memory(fleet: Fleet, memory_bytes: Mapping[str, int]) -> Fleet:
    """The fleet with this memory, by device, where it is less than stated. Devices that it does not have are ignored:
    they may have been left out of it."""
    devices = tuple(
        msgspec.structs.replace(d, memory_bytes=min(d.memory_bytes, memory_bytes.get(d.name, d.memory_bytes)))
        for d in fleet.devices
    )
    return msgspec.structs.replace(fleet, devices=devices)


def changed(fleet: Fleet, changes: Iterable[FleetChange], step: int) -> Fleet:
    """The fleet as it is in a step. Of several changes to one thing the latest counts."""
    speeds: dict[str, float] = {}
    bandwidths: dict[tuple[str, str], float] = {}
    for change in sorted((c for c in changes if c.step <= step), key=lambda c: c.step):
        if change.link is None:
            speeds[change.device] = fleet.device(change.device).sustained_flops_per_s * change.factor
        else:
            bandwidths[change.link] = fleet.link(*change.link).bandwidth_bytes_per_s * change.factor
    return corrected(fleet, speeds, bandwidths)


LEAST_LATENCY_S = 1e-6
MOST_BANDWIDTH = 1e12  # bytes per second: what cannot be distinguished from no time at all


def fit_link(times: Sequence[tuple[int, float]]) -> Link:
    """The link of FusionLLM's T(M) = alpha + beta M, from round trips (size_bytes there and next to nothing back,
    seconds): those take 2 alpha + beta M, if both directions have the same latency.

    Of each size the lower quartile counts: what else a machine or a line does makes a trip longer, never shorter. Sizes
    are weighted by 1 / T, so that small ones tell the latency and large ones the bandwidth.
    UserError for fewer than two sizes.
    """
    by_size: dict[int, list[float]] = {}
    for size_bytes, seconds in times:
        by_size.setdefault(size_bytes, []).append(seconds)
    if len(by_size) < 2:
        raise UserError(f"link probe: got times of {len(by_size)} sizes, expected two or more")
    sizes = np.array(sorted(by_size), dtype=np.float64)
    usual_s = np.array([float(np.quantile(by_size[int(size)], 0.25)) for size in sizes])
    columns = np.stack([np.ones_like(sizes), sizes], axis=1)
    (intercept_s, slope), *_ = np.linalg.lstsq(columns / usual_s[:, None], np.ones_like(usual_s), rcond=None)
    return Link(max(float(intercept_s) / 2, LEAST_LATENCY_S), min(1 / max(float(slope), 1e-30), MOST_BANDWIDTH))
