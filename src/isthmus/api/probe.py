"""Measure this machine's devices, or the devices of a fleet and the links between them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import msgspec

from isthmus.accelerators import accelerator_names, resolve_accelerator
from isthmus.api.job_overrides import job_of
from isthmus.api.join import accelerators_of, memory_of, part_of
from isthmus.api.serve import Where
from isthmus.api.serving_fleet import Serving, serving_fleet
from isthmus.engines import check_engine
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.job import Job, prepare
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.fleet_probe import NO_JOB, probe_fleet, probe_machine, speed_question
from isthmus.runtime.service.hardware import hardware_of


class Probing(msgspec.Struct, frozen=True, kw_only=True):
    names: tuple[str, ...] = ()  # devices that joined; none: this machine's
    job: Path | None = None
    device: str = ""
    devices: str = ""  # accelerators of this machine; without either the CPU and all accelerators
    memory: str = ""  # the part of the memory of each of this machine's devices that may be taken
    engine: str = "torch"  # the engine that computes on this machine's devices


def probe_devices(asked: Probing, serving: Serving, log: Callable[[str], None]) -> Fleet:
    """Measured, with the links between them."""
    ours = {"--device": asked.device, "--devices": asked.devices, "--memory": asked.memory}
    ours["--engine"] = asked.engine if asked.engine != "torch" else ""
    for option in (name for name, given in ours.items() if given and asked.names):
        raise UserError(f"{option}: it is for this machine, expected it without names of devices that joined")
    places = {} if asked.names else _places(asked)
    job = None if asked.job is None else job_of(asked.job, command="isthmus probe")
    prepared = None if job is None else prepare(job)
    compute = NO_JOB if prepared is None else speed_question(prepared)
    description = "" if prepared is None else _described(prepared.job)
    if not asked.names:
        return probe_machine(platform.node(), places, log, compute, description)
    with serving_fleet(serving, log) as service:
        service.wait_for(asked.names)
        return probe_fleet(service, asked.names, log, compute, description)


def _described(job: Job) -> str:
    return (
        f"measured by isthmus probe for {job.name}: {job.model.name}, micro-batches of {job.micro_batch_size}, "
        f"{job.training.precision}"
    )


def _places(asked: Probing) -> dict[str, ProcessPlace]:
    """Return the places by the names that `isthmus join --devices` gives them. UserError for one that is not here."""
    if asked.device and asked.devices:
        raise UserError("--devices: got it beside --device, expected one of the two")
    if asked.device:
        name = resolve_accelerator(asked.device, "--device")
        chosen = {part_of(name): name}
    elif asked.devices:
        chosen = accelerators_of(asked.devices)
    else:
        chosen = {part_of(name): name for name in ("cpu", *accelerator_names())}
    engine = check_engine("--engine", asked.engine)
    found = hardware_of(list(chosen.values()), "--device" if asked.device else "--devices")
    return {
        f"{platform.node()}/{part}": ProcessPlace(
            accelerator=hardware.accelerator,
            hardware=hardware.label,
            engine=engine,
            memory_bytes=memory_of(asked.memory, hardware.accelerator),
        )
        for part, hardware in zip(chosen, found, strict=True)
    }


def probe(
    *names: str,
    job: str | Path | None = None,
    device: str = "",
    memory: str = "",
    engine: str = "torch",
    note: Callable[[str], None] = lambda _: None,
    **where: Unpack[Where],
) -> Fleet:
    """Measure this machine's devices; or, by their names, those of a fleet and the links between them.

    With a `job` speeds (FLOP/s) are those of its model's first layers. `device` is one of this machine's, as "cpu";
    `memory` what may be taken of each, `engine` what computes there, torch or jax. `isthmus.fleet.dump_fleet` writes
    the fleet as TOML. Devices of a fleet are waited for. UserError for a device that is not here.

    >>> fleet = isthmus.probe(device="cpu")  # doctest: +SKIP
    """
    if where and not names:
        raise UserError(f"probe: got {', '.join(where)} without names of devices, expected them for a fleet")
    asked = Probing(names=names, job=None if job is None else Path(job), device=device, memory=memory, engine=engine)
    return probe_devices(asked, Serving(**where), note)
