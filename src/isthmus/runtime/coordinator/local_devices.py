"""Where the device processes of a run on this machine compute."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.accelerators import AUTO, accelerator_names, resolve_accelerator
from isthmus.errors import UserError, unknown_name
from isthmus.runtime.processes.device_processes import ProcessPlace

FIELD = "runtime.device"


def local_places(chosen: str | dict[str, str], devices: Sequence[str]) -> dict[str, ProcessPlace]:
    """The place of each device of the fleet, by `[runtime] device`. Raises UserError for a device or an accelerator
    that does not exist."""
    if isinstance(chosen, str):
        return dict(zip(devices, _dealt(len(devices)), strict=True)) if chosen == AUTO else _all(chosen, devices)
    for device in chosen:
        if device not in devices:
            raise UserError(f"{FIELD}: {unknown_name('device', device, devices)}")
    return {device: _place(name, f"{FIELD}.{device}") for device, name in chosen.items()}


def _dealt(count: int) -> list[ProcessPlace]:
    """This machine's accelerators in turn: more devices than there are share them."""
    here = accelerator_names() or ("cpu",)
    return [ProcessPlace(accelerator=here[number % len(here)]) for number in range(count)]


def _all(name: str, devices: Sequence[str]) -> dict[str, ProcessPlace]:
    return dict.fromkeys(devices, _place(name, FIELD))


def _place(name: str, field: str) -> ProcessPlace:
    return ProcessPlace(accelerator=resolve_accelerator(name, field))
