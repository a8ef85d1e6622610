"""`isthmus probe`: this machine's devices, or those of a fleet and the links between them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from isthmus.accelerators import accelerator_names, resolve_accelerator
from isthmus.cli.joining import accelerators_of, memory_of, part_of
from isthmus.cli.options import notes, out
from isthmus.cli.serving import Serving, serving_fleet, teller
from isthmus.errors import UserError
from isthmus.federated.job import is_federated
from isthmus.fleet import Device, Fleet, Link, dump_fleet
from isthmus.job import Job, load_job, prepare
from isthmus.runtime.processes.launcher import Place
from isthmus.runtime.service.first_layers import question
from isthmus.runtime.service.fleet_probe import NO_JOB, probe_fleet
from isthmus.runtime.service.hardware import hardware_of
from isthmus.runtime.service.local_probe import probe_machine
from isthmus.units import format_bandwidth, format_compute, format_duration, format_size


class Probing(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    names: tuple[str, ...] = ()
    """Devices that joined; none: this machine's."""
    job: Path | None = None
    device: str = ""
    devices: str = ""
    """Of this machine; without either the CPU and all accelerators."""
    memory: str = ""
    """What may be taken of each of this machine's."""
    target: Path | None = None


def probe(asked: Probing, state: Path | None, serving: Serving) -> None:
    """Measure, print the matrix, write the fleet."""
    told = notes()
    say = teller(told)
    if asked.names and (asked.device or asked.devices or asked.memory):
        option = "--device" if asked.device else "--devices" if asked.devices else "--memory"
        raise UserError(f"{option}: it is for this machine, expected it without names of devices that joined")
    places = {} if asked.names else _places(asked)
    job = None if asked.job is None else _job(asked.job)
    compute = NO_JOB if job is None else question(prepare(job))
    description = "" if job is None else _described(job)
    if asked.names:
        with serving_fleet(state, serving, say) as service:
            service.wait_for(asked.names)
            fleet = probe_fleet(service, asked.names, say, compute, description)
    else:
        fleet = probe_machine(platform.node(), places, say, compute, description)
    for device in fleet.devices:
        say(f"{device.name}: {_device_text(device)}")
    _write(fleet, asked.target, told, say)


def _job(path: Path) -> Job:
    if is_federated(path):
        raise UserError(
            f"--job {path}: got a federated job, expected one whose model is cut into stages: the rounds themselves "
            "measure executors"
        )
    return load_job(path)


def _described(job: Job) -> str:
    return (
        f"measured by isthmus probe for {job.name}: {job.model.name}, micro-batches of {job.micro_batch_size}, "
        f"{job.training.precision}"
    )


def _places(asked: Probing) -> dict[str, Place]:
    """By the names that `isthmus join --devices` would give them. UserError for one that is not here."""
    if asked.device and asked.devices:
        raise UserError("--devices: got it beside --device, expected one of the two")
    if asked.device:
        name = resolve_accelerator(asked.device, "--device")
        chosen = {part_of(name): name}
    elif asked.devices:
        chosen = accelerators_of(asked.devices)
    else:
        chosen = {part_of(name): name for name in ("cpu", *accelerator_names())}
    found = hardware_of(list(chosen.values()), "--device" if asked.device else "--devices")
    return {
        f"{platform.node()}/{part}": Place(
            accelerator=hardware.accelerator, hardware=hardware.label,
            memory_bytes=memory_of(asked.memory, hardware.accelerator),
        )
        for part, hardware in zip(chosen, found, strict=True)
    }  # fmt: skip


def _write(fleet: Fleet, target: Path | None, told: Console, say: Callable[[str], None]) -> None:
    drawn = _matrix(fleet, fleet.names)
    if target is None:
        typer.echo(dump_fleet(fleet))
        told.print(drawn)
        return
    target.write_text(dump_fleet(fleet), encoding="utf-8")
    out().print(drawn)
    say(f"wrote {target}: --fleet {target} plans with it")


def _matrix(fleet: Fleet, names: Sequence[str]) -> Table:
    drawn = Table("from", *names, "speed", title="Latency, bandwidth")
    for device in fleet.devices:
        cells = ["" if n == device.name else _link_text(fleet.link(device.name, n)) for n in names]
        half = f", half {format_compute(device.half_flops_per_s)}" if device.half_flops_per_s else ""
        drawn.add_row(device.name, *cells, format_compute(device.sustained_flops_per_s) + half)
    return drawn


def _device_text(device: Device) -> str:
    copies = f", {format_bandwidth(device.host_bytes_per_s)} to and from the host" if device.host_bytes_per_s else ""
    speeds = "".join(f", {m.what} {format_compute(m.flops_per_s)}" for m in device.measured)
    return f"{device.hardware or 'hardware not told'}, {format_size(device.memory_bytes)} of memory{copies}{speeds}"


def _link_text(link: Link) -> str:
    return f"{format_duration(link.latency_s)}, {format_bandwidth(link.bandwidth_bytes_per_s)}"
