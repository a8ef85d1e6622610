"""Fleets and planners as terminal tables. Nothing is printed here: the caller has the console."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from isthmus.fleet import Device, Fleet, Link
from isthmus.report.tables import new_table, titled
from isthmus.units import format_bandwidth, format_compute, format_duration, format_size

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
