"""A coordinator's fleet: it listens and is probed."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from isthmus.cli import options
from isthmus.cli.options import notes, state_folder
from isthmus.errors import UserError
from isthmus.fleet import Device, Link, dump_fleet
from isthmus.job import load_job, prepare
from isthmus.runtime.messages.probe import Product
from isthmus.runtime.service.fleet_probe import probe_fleet
from isthmus.runtime.service.fleet_state import Addresses, FleetState
from isthmus.runtime.service.products import products_of
from isthmus.runtime.service.service import Service
from isthmus.units import format_bandwidth, format_compute, format_duration, format_size


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator listens, and how it is reached."""

    host: str
    port: int
    addresses: tuple[str, ...]
    tickets: int
    patience: str


def probe(
    state: Path | None, serving: Serving, devices: Sequence[str], target: Path | None, out: Console,
    job_file: Path | None = None,
) -> None:  # fmt: skip
    """Wait for the devices, measure them, in a job's products if there is one, and their links, print the matrix, write
    the fleet."""
    told = notes()
    say = teller(told)
    products: tuple[Product, ...] = ()
    if job_file is not None:
        prepared = prepare(load_job(job_file))
        products = products_of(prepared.captured.train, prepared.job.micro_batch_size)
        if not products:
            say(f"{job_file}: its model has no matrix products: devices are measured in convolutions")
    with serving_fleet(state, serving, say) as service:
        service.wait_for(devices)
        fleet = probe_fleet(service, devices, say, products)
    drawn = Table("from", *devices, "speed", title="Latency, bandwidth")
    for device in fleet.devices:
        cells = ["" if n == device.name else _link_text(fleet.link(device.name, n)) for n in devices]
        half = f", bf16 {format_compute(device.half_flops_per_s)}" if device.half_flops_per_s else ""
        drawn.add_row(device.name, *cells, format_compute(device.sustained_flops_per_s) + half)
        say(f"{device.name}: {_device_text(device)}")
    if target is None:
        typer.echo(dump_fleet(fleet))
        told.print(drawn)
        return
    target.write_text(dump_fleet(fleet), encoding="utf-8")
    out.print(drawn)
    say(f"wrote {target}: --fleet {target} plans with it")


def teller(notes: Console) -> Callable[[str], None]:
    """Tells people one line."""

    def say(text: str) -> None:
        notes.print(text, highlight=False, markup=False, soft_wrap=True)

    return say


def _device_text(device: Device) -> str:
    copies = f", {format_bandwidth(device.host_bytes_per_s)} to and from the host" if device.host_bytes_per_s else ""
    return f"{device.hardware or 'hardware not told'}, {format_size(device.memory_bytes)} of memory{copies}"


def _link_text(link: Link) -> str:
    return f"{format_duration(link.latency_s)}, {format_bandwidth(link.bandwidth_bytes_per_s)}"


@contextlib.contextmanager
def serving_fleet(state: Path | None, serving: Serving, say: Callable[[str], None]) -> Generator[Service]:
    """A service that listens; tickets are on stdout."""
    fleet = FleetState(state or state_folder("fleet"))
    patience_s = options.patience_s(serving.patience)
    with (
        fleet.served(),
        Service(fleet, serving.host, serving.port, patience_s=patience_s, say=say) as service,
    ):
        fleet.listens_at(_addresses(serving, service.port))
        service.start()
        say(f"listening on {serving.host}:{service.port} with TLS; state folder {fleet.folder}")
        for _ in range(serving.tickets):
            typer.echo(fleet.ticket())
        if serving.tickets:
            say("each ticket lets one machine join, within 24 hours: `isthmus join` asks for it")
        yield service


def _addresses(serving: Serving, port: int) -> Addresses:
    """UserError where nobody could tell how the coordinator is reached."""
    if serving.addresses:
        return tuple(_address(text, port) for text in serving.addresses)
    if _is_wildcard(serving.host):
        raise UserError(f"--host {serving.host!r}: tickets need an address that devices can dial: add --address HOST")
    return ((serving.host, port),)


def _is_wildcard(host: str) -> bool:
    """Of an address that can be bound. "" and "0" stand for every address too."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return any(ipaddress.ip_address(entry[4][0]).is_unspecified for entry in found)


def _address(text: str, port: int) -> tuple[str, int]:
    """HOST, HOST:PORT, or [HOST]:PORT for one with colons."""
    if not text.strip("[]: "):
        raise UserError(f"--address: got {text!r}, expected HOST or HOST:PORT")
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        return text.strip("[]"), port
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise UserError(f"--address {text}: port: got {number!r}, expected a number up to 65535")
    return host.strip("[]"), int(number)
