"""A fleet as people write it.

    name = "my-fleet"                       # else the file's name
    description = "two offices and a cloud"

    [[device]]
    name = "gpu"                            # with a count: gpu-0, gpu-1, ...
    region = "office"                       # else "local"
    compute = "10 GFLOPS"
    scale = 0.4                             # sustained over stated speed, as measured; else 1
    memory = "16 GiB"
    count = 8
    price_per_hour = 1.2
    hardware = "NVIDIA A40"                 # for people
    half_compute = "30 GFLOPS"              # sustained in bf16 and fp16, where that differs
    host_bandwidth = "200 Gbit/s"           # between the accelerator and the host's memory, for people
    engine = "jax"                          # what computes its stages; else torch

    [links]
    default = { latency = "50 ms", bandwidth = "100 Mbit/s" }
    intra = { latency = "0.5 ms", bandwidth = "1 Gbit/s" }    # devices of one region

    [[link]]                                # two devices, or two regions; a region and itself
    from = "office"
    to = "cloud"
    latency = "20 ms"
    bandwidth = "300 Mbit/s"
    symmetric = false                       # else the same both ways

    [[link]]                                # a link that was measured over time: a CSV file beside this one, with the
    from = "office"                         # columns time, latency, bandwidth, or the rows themselves
    to = "home"
    trace = "office-home.csv"

    [[region]]                                # what the devices of a region share towards the others
    region = "office"
    uplink = "200 Mbit/s"                   # taken together by all links that leave it
    egress_price_per_gb = 0.09

Lengths of time, bandwidths, speeds and sizes are texts with a unit (see `isthmus.units`), or SI base values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec

from isthmus.documents import convert, parse_toml
from isthmus.engines import check_engine
from isthmus.errors import UserError, unknown_name
from isthmus.fleet.fleet import Device, Fleet, Measurement
from isthmus.fleet.links import Link, Links, Region, Route, read_link_trace
from isthmus.units import (
    format_bandwidth,
    format_compute,
    format_duration,
    format_size,
    parse_bandwidth,
    parse_compute,
    parse_duration,
    parse_size,
)

# More is a slip of the keyboard, not a fleet; it would be noticed only when memory ran out.
MOST_DEVICES = 100_000


class _DeviceTable(msgspec.Struct, frozen=True, kw_only=True):
    """A device, or several that are equal."""

    name: str  # The device's name; with `count`, NAME-0, NAME-1, ...
    region: str = "local"  # Where it is. Links can be given between regions.
    compute: object  # Speed in float32, as "10 GFLOPS".
    memory: object  # As "16 GiB".
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] | None = None  # So many equal devices.
    price_per_hour: float = 0.0  # In any unit of money, the same for all devices.
    hardware: str = ""  # For people: "NVIDIA A40".
    scale: float = 1.0  # Sustained speed over `compute`, as `isthmus probe` or `isthmus calibrate` measured it.
    half_compute: object = 0.0  # Sustained speed in bf16 and fp16, where it differs.
    host_bandwidth: object = 0.0  # Between an accelerator and the host's memory, for people.
    measured: dict[str, object] = {}
    """Measurements of `isthmus probe`, for people: "products in fp32" = "8 TFLOPS", ..."""
    engine: str = "torch"  # The framework that computes its stages: `torch` or `jax`.


class _LinkTable(msgspec.Struct, frozen=True, kw_only=True):
    """A link."""

    latency: object = None  # one way, as "20 ms"
    bandwidth: object = None  # as "100 Mbit/s"
    trace: object = None  # in place of both: a CSV file with the columns time, latency, bandwidth, or its rows


class _RouteTable(msgspec.Struct, frozen=True, kw_only=True, rename={"source": "from", "target": "to"}):
    """The link between two devices or two regions; of a region with itself, between its devices."""

    source: str  # A device or a region.
    target: str  # A device or a region.
    latency: object = None  # One way, as "20 ms".
    bandwidth: object = None  # As "100 Mbit/s".
    trace: object = None  # In place of both: a CSV file with the columns time, latency, bandwidth, or its rows.
    symmetric: bool = True  # Whether the way back is the same.


class _RegionTable(msgspec.Struct, frozen=True, kw_only=True):
    """The uplink and the prices that the devices of a region share towards other regions."""

    region: str  # The region.
    uplink: object = None  # Bandwidth that all links out of it share, as "200 Mbit/s".
    egress_price_per_gb: float = 0.0  # The price of bytes that leave the region.


class _LinksTable(msgspec.Struct, frozen=True, kw_only=True):
    """Links that no [[link]] names."""

    default: object = None  # Between regions: { latency = "50 ms", bandwidth = "100 Mbit/s" }.
    intra: object = None  # Between devices of one region, in the same form.


class _FleetTable(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet file."""

    name: str | None = None  # The fleet's name; without it the file's name.
    description: str = ""  # For people.
    device: list[object]  # The devices: one table [[device]] each.
    links: object = None  # Links that no [[link]] names.
    link: list[object] = []  # Links between two devices or two regions: one table [[link]] each.
    region: list[object] = []  # Uplinks and prices that the devices of a region share: one table [[region]] each.


TABLES: Mapping[str, type[msgspec.Struct]] = {  # tables of a fleet file, by heading
    "": _FleetTable,
    "[[device]]": _DeviceTable,
    "[links]": _LinksTable,
    "[[link]]": _RouteTable,
    "[[region]]": _RegionTable,
}

Table = TypeVar("Table", _DeviceTable, _LinkTable, _RouteTable, _LinksTable, _RegionTable, _FleetTable)


def load_fleet(path: str | Path) -> Fleet:
    """Read a fleet from a TOML file. Raises `UserError`, naming the file and the line or the field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the fleet: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read the fleet: not UTF-8 text (byte {error.start})") from None
    return parse_fleet(text, str(path))


def parse_fleet(text: str, source: str) -> Fleet:
    """The fleet written in `text`; `source` is what messages call it, and its stem the fleet's name if it has none."""
    fleet = _table(parse_toml(text, source), _FleetTable, f"{source}: top level")
    devices = tuple(_devices(fleet.device, source))
    links = _links(fleet, devices, source)
    try:
        return Fleet(
            name=Path(source).stem if fleet.name is None else fleet.name,
            devices=devices,
            links=links,
            region_info=tuple(_regions(fleet.region, source)),
            description=fleet.description,
        )
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def dump_fleet(fleet: Fleet) -> str:
    """TOML that `parse_fleet` turns into an equal fleet: every digit is kept, in units that people read."""
    head = [f"name = {_quoted(fleet.name)}"]
    if fleet.description:
        head.append(f"description = {_quoted(fleet.description)}")
    blocks = ["\n".join(head), *(_dump_device(device) for device in fleet.devices)]
    shared = [("default", fleet.links.default), ("intra", fleet.links.intra)]
    lines = [f"{key} = {{ {', '.join(_dump_link(link))} }}" for key, link in shared if link is not None]
    if lines:
        blocks.append("\n".join(["[links]", *lines]))
    blocks += [*_dump_routes(fleet.links.regions), *_dump_routes(fleet.links.devices)]
    blocks += [_dump_region(site) for site in fleet.region_info]
    return "\n\n".join(blocks) + "\n"


def _devices(tables: list[object], source: str) -> Iterator[Device]:
    total = 0
    for number, raw in enumerate(tables, 1):
        table = _table(raw, _DeviceTable, f"{source}: [[device]] {number}")
        where = f"{source}: [[device]] {number} {table.name!r}"
        count = 1 if table.count is None else table.count
        total += count
        if total > MOST_DEVICES:
            raise UserError(f"{where}: count: got {total} devices so far, expected at most {MOST_DEVICES}")
        flops_per_s = parse_compute(table.compute, f"{where}: compute")
        memory_bytes = parse_size(table.memory, f"{where}: memory")
        half_flops_per_s = parse_compute(table.half_compute, f"{where}: half_compute") if table.half_compute else 0.0
        host_bytes_per_s = 0.0
        if table.host_bandwidth:
            host_bytes_per_s = parse_bandwidth(table.host_bandwidth, f"{where}: host_bandwidth")
        engine = check_engine(f"{where}: engine", table.engine)
        measured = tuple(
            Measurement(what, parse_compute(speed, f"{where}: measured.{what}"))
            for what, speed in table.measured.items()
        )
        names = [table.name] if table.count is None else [f"{table.name}-{i}" for i in range(count)]
        for name in names:
            try:
                yield Device(
                    name=name,
                    region=table.region,
                    flops_per_s=flops_per_s,
                    memory_bytes=memory_bytes,
                    price_per_hour=table.price_per_hour,
                    hardware=table.hardware,
                    scale=table.scale,
                    half_flops_per_s=half_flops_per_s,
                    host_bytes_per_s=host_bytes_per_s,
                    measured=measured,
                    engine=engine,
                )
            except UserError as error:
                raise UserError(f"{where}: {error}") from None


def _links(fleet: _FleetTable, devices: tuple[Device, ...], source: str) -> Links:
    shared = _table({} if fleet.links is None else fleet.links, _LinksTable, f"{source}: [links]")
    names = {device.name for device in devices}
    regions = {device.region for device in devices}
    region_routes: list[Route] = []
    device_routes: list[Route] = []
    for number, raw in enumerate(fleet.link, 1):
        where = f"{source}: [[link]] {number}"
        table = _table(raw, _RouteTable, where)
        link = _link(table, source, where)
        ends = (table.source, table.target)
        for key, end in zip(("from", "to"), ends, strict=True):
            if end not in names and end not in regions:
                raise UserError(f"{where}: {key}: {unknown_name('device or region', end, names | regions)}")
        if not (names.issuperset(ends) or regions.issuperset(ends)):
            raise UserError(f"{where}: got {ends[0]!r} and {ends[1]!r}, expected two devices or two regions")
        routes = device_routes if names.issuperset(ends) else region_routes
        routes.append(Route(*ends, link))
        if table.symmetric and ends[0] != ends[1]:
            routes.append(Route(ends[1], ends[0], link))
    return Links(
        default=_shared_link(shared.default, source, "default"),
        intra=_shared_link(shared.intra, source, "intra"),
        regions=tuple(region_routes),
        devices=tuple(device_routes),
    )


def _regions(tables: list[object], source: str) -> Iterator[Region]:
    for number, raw in enumerate(tables, 1):
        where = f"{source}: [[region]] {number}"
        table = _table(raw, _RegionTable, where)
        uplink = None if table.uplink is None else parse_bandwidth(table.uplink, f"{where}: uplink")
        try:
            yield Region(region=table.region, uplink_bytes_per_s=uplink, egress_price_per_gb=table.egress_price_per_gb)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _shared_link(raw: object, source: str, key: str) -> Link | None:
    where = f"{source}: [links] {key}"
    return None if raw is None else _link(_table(raw, _LinkTable, where), source, where)


def _link(table: _LinkTable | _RouteTable, source: str, where: str) -> Link:
    if table.trace is not None:
        if table.latency is not None or table.bandwidth is not None:
            raise UserError(f"{where}: got a trace and a latency or bandwidth, expected one or the other")
        return read_link_trace(table.trace, Path(source).parent, f"{where}: trace").mean()
    for key, got in (("latency", table.latency), ("bandwidth", table.bandwidth)):
        if got is None:
            raise UserError(f"{where}: {key}: missing; expected latency and bandwidth, or a trace")
    return Link(
        latency_s=parse_duration(table.latency, f"{where}: latency"),
        bandwidth_bytes_per_s=parse_bandwidth(table.bandwidth, f"{where}: bandwidth"),
    )


def _table(raw: object, form: type[Table], where: str) -> Table:
    if not isinstance(raw, dict):
        raise UserError(f"{where}: got {raw!r}, expected a table")
    return convert(cast("dict[str, object]", raw), form, where)


def _dump_device(device: Device) -> str:
    lines = [
        "[[device]]",
        f"name = {_quoted(device.name)}",
        f"region = {_quoted(device.region)}",
        f"compute = {_quoted(format_compute(device.flops_per_s, exact=True))}",
        f"memory = {_quoted(format_size(device.memory_bytes, exact=True))}",
    ]
    if device.hardware:
        lines.append(f"hardware = {_quoted(device.hardware)}")
    if device.half_flops_per_s:
        lines.append(f"half_compute = {_quoted(format_compute(device.half_flops_per_s, exact=True))}")
    if device.host_bytes_per_s:
        lines.append(f"host_bandwidth = {_quoted(format_bandwidth(device.host_bytes_per_s, exact=True))}")
    if device.measured:
        entries = (f"{_quoted(m.what)} = {_quoted(format_compute(m.flops_per_s, exact=True))}" for m in device.measured)
        lines.append(f"measured = {{ {', '.join(entries)} }}")
    if device.engine != "torch":
        lines.append(f"engine = {_quoted(device.engine)}")
    if device.scale != 1:
        lines.append(f"scale = {float(device.scale)!r}")
    if device.price_per_hour:
        lines.append(f"price_per_hour = {float(device.price_per_hour)!r}")
    return "\n".join(lines)


def _dump_routes(routes: tuple[Route, ...]) -> Iterator[str]:
    """One block for a route, and for the route back where that follows at once and is equal."""
    number = 0
    while number < len(routes):
        route = routes[number]
        number += 1
        back = Route(route.target, route.source, route.link)
        same_back = number < len(routes) and routes[number] == back
        number += same_back
        lines = ["[[link]]", f"from = {_quoted(route.source)}", f"to = {_quoted(route.target)}"]
        lines += _dump_link(route.link)
        if not same_back and route.source != route.target:
            lines.append("symmetric = false")
        yield "\n".join(lines)


def _dump_link(link: Link) -> tuple[str, ...]:
    if link.trace is not None:
        columns = (link.trace.times_s, link.trace.latency_s, link.trace.bandwidth_bytes_per_s)
        return (f"trace = [{', '.join(f'[{t!r}, {a!r}, {b!r}]' for t, a, b in zip(*columns, strict=True))}]",)
    return (
        f"latency = {_quoted(format_duration(link.latency_s, exact=True))}",
        f"bandwidth = {_quoted(format_bandwidth(link.bandwidth_bytes_per_s, exact=True))}",
    )


def _dump_region(site: Region) -> str:
    lines = ["[[region]]", f"region = {_quoted(site.region)}"]
    if site.uplink_bytes_per_s is not None:
        lines.append(f"uplink = {_quoted(format_bandwidth(site.uplink_bytes_per_s, exact=True))}")
    if site.egress_price_per_gb:
        lines.append(f"egress_price_per_gb = {float(site.egress_price_per_gb)!r}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # A JSON string is a TOML string too, once it is printable (checked by the fleet) and kept as it is (no \\u pairs).
    return json.dumps(text, ensure_ascii=False)
