"""Fleets and planners as terminal tables. Nothing is printed here: the caller has the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from isthmus.fleet import Device, Fleet, Link
from isthmus.report.tables import new_table, titled
from isthmus.units import format_bandwidth, format_compute, format_duration, format_size

MOST_DEVICE_ROWS = 16
MOST_MATRIX_REGIONS = 8
NOT_IN_THE_SEARCH = (
    "data holders, labels stay: without yes, such a job is refused; price: without yes, time is minimised; "
    "compression: without yes, messages are packed once the plan is found; ?: not declared"
)


def fleets_table(fleets: Iterable[tuple[str, str]]) -> RenderableType:
    """From (name, description) pairs."""
    return names_table("Built-in fleets", "fleet", fleets)


def planners_table(
    title: str, planners: Iterable[tuple[str, str, tuple[str, ...] | None]], abilities: tuple[str, ...] = ()
) -> RenderableType:
    """From (name, description, abilities); with a column for each of `abilities`, "?" where they are not declared."""
    table = new_table(("planner", *(ability.replace(" ", "\n") for ability in abilities), "what it is"))
    table.columns[0].no_wrap = True
    for name, description, able in planners:
        cells = ["?" if able is None else "yes" if ability in able else "-" for ability in abilities]
        table.add_row(Text(name, "bold"), *map(Text, cells), Text(description))
    return titled(title, table, NOT_IN_THE_SEARCH if abilities else "")


def names_table(title: str, noun: str, pairs: Iterable[tuple[str, str]]) -> RenderableType:
    """From (name, description) pairs."""
    table = new_table((noun, "what it is"))
    table.columns[0].no_wrap = True
    for name, description in pairs:
        table.add_row(Text(name, "bold"), Text(description))
    return titled(title, table)


def fleet_table(fleet: Fleet) -> RenderableType:
    """The devices, and latency and bandwidth from region to region.

    Above 16 devices, equal devices of one region share a row; above 8 regions, each has one row with the range of
    its links in place of the matrix.
    """
    parts: list[RenderableType] = [_devices(fleet)]
    if len(fleet.devices) > 1:
        parts.append(_matrix(fleet) if len(fleet.regions) <= MOST_MATRIX_REGIONS else _region_rows(fleet))
    return Group(*parts)


def _devices(fleet: Fleet) -> RenderableType:
    count = len(fleet.devices)
    title = f"{fleet.name}: {count} device{'s' * (count > 1)}"
    columns = ("region", "hardware", "compute", "memory", "price per hour")
    numbers = columns[2:]
    if count <= MOST_DEVICE_ROWS:
        table = new_table(("device", *columns), numbers)
        for device in fleet.devices:
            table.add_row(*map(Text, (device.name, *_device_cells(device))))
    else:
        table = new_table(("devices", *columns), ("devices", *numbers))
        # Devices of one region that differ in their names only.
        groups = Counter(_device_cells(device) for device in fleet.devices)
        for cells, members in groups.items():
            table.add_row(*map(Text, (str(members), *cells)))
    return titled(title, table, fleet.description)


def _device_cells(device: Device) -> tuple[str, ...]:
    price = f"{device.price_per_hour:.2f}" if device.price_per_hour else "-"
    return (
        device.region,
        device.hardware or "-",
        format_compute(device.sustained_flops_per_s),
        format_size(device.memory_bytes),
        price,
    )


def _matrix(fleet: Fleet) -> RenderableType:
    table = new_table(("from", *fleet.regions))
    links = _links_between(fleet)
    for source in fleet.regions:
        cells = [Text("\n").join(map(Text, _ranges(links[source, target]))) for target in fleet.regions]
        table.add_row(Text(source), *cells)
    return titled("Links: latency and bandwidth, from row to column", table)


def _region_rows(fleet: Fleet) -> RenderableType:
    columns = ("latency inside", "bandwidth inside", "latency to others", "bandwidth to others")
    table = new_table(("from", *columns))
    links = _links_between(fleet)
    for source in fleet.regions:
        others = [link for target in fleet.regions if target != source for link in links[source, target]]
        cells = (source, *_ranges(links[source, source]), *_ranges(others))
        table.add_row(*map(Text, cells))
    return titled("Links: latency and bandwidth, by the region they start in", table)


def _links_between(fleet: Fleet) -> dict[tuple[str, str], list[Link]]:
    """The different links from each region to each. Costs regions squared and the pairs stated one by one."""
    members: dict[str, list[str]] = {region: [] for region in fleet.regions}
    for device in fleet.devices:
        members[device.region].append(device.name)
    stated = {(route.source, route.target) for route in fleet.links.devices}
    region = {device.name: device.region for device in fleet.devices}
    found: dict[tuple[str, str], dict[Link, None]] = {(a, b): {} for a, b in product(fleet.regions, fleet.regions)}
    for route in fleet.links.devices:
        found[region[route.source], region[route.target]][route.link] = None
    for (source, target), links in found.items():
        # One pair of devices stands for all that have no link of their own.
        pairs = ((a, b) for a, b in product(members[source], members[target]) if a != b and (a, b) not in stated)
        pair = next(pairs, None)
        if pair is not None:
            links[fleet.link(*pair)] = None
    return {pair: list(links) for pair, links in found.items()}


def _ranges(links: list[Link]) -> tuple[str, str]:
    """Latency and bandwidth of the links, each as "low - high" where they differ; dashes for no link."""
    if not links:
        return "-", "-"
    latencies = [link.latency_s for link in links]
    bandwidths = [link.bandwidth_bytes_per_s for link in links]
    return (
        _range(format_duration(min(latencies)), format_duration(max(latencies))),
        _range(format_bandwidth(min(bandwidths)), format_bandwidth(max(bandwidths))),
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} - {high}"


def matrix_table(fleet: Fleet) -> Table:
    """Latency and bandwidth from each device to each, and its speed."""
    names = fleet.names
    drawn = Table("from", *names, "speed", title="Latency, bandwidth")
    for device in fleet.devices:
        cells = ["" if n == device.name else _link_text(fleet.link(device.name, n)) for n in names]
        half = f", half {format_compute(device.half_flops_per_s)}" if device.half_flops_per_s else ""
        drawn.add_row(device.name, *cells, format_compute(device.sustained_flops_per_s) + half)
    return drawn


def device_text(device: Device) -> str:
    copies = f", {format_bandwidth(device.host_bytes_per_s)} to and from the host" if device.host_bytes_per_s else ""
    speeds = "".join(f", {m.what} {format_compute(m.flops_per_s)}" for m in device.measured)
    engine = "" if device.engine == "torch" else f" by {device.engine}"
    memory = f"{format_size(device.memory_bytes)} of memory"
    return f"{device.hardware or 'hardware unknown'}{engine}, {memory}{copies}{speeds}"


def _link_text(link: Link) -> str:
    return f"{format_duration(link.latency_s)}, {format_bandwidth(link.bandwidth_bytes_per_s)}"


def fitted_text(fleet: Fleet) -> str:
    """The speed of each device that differs from the fleet file."""
    text = ", ".join(
        f"{d.name} computes at {format_compute(d.sustained_flops_per_s)}, {100 * d.scale:.3g} % of what "
        "the fleet file says"
        for d in fleet.devices
        if d.scale != 1
    )
    return text or "all devices compute as stated"
