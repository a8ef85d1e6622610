"""Executors on the devices of a fleet: which executor is on which device, and their links to the coordinator."""

from __future__ import annotations

import msgspec

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, resolve_fleet
from isthmus.units import format_size


class ExecutorFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Executor number k is on device number k, alone. The coordinator is on the machine of one of the fleet's devices,
    and every device has its link to that machine for itself."""

    fleet: Fleet
    devices: tuple[Device, ...]  # the executors' devices
    coordinator: str  # the device on whose machine the coordinator is: no link lies between the two

    @property
    def names(self) -> list[str]:
        return [device.name for device in self.devices]

    def flops_per_s(self, executor: int) -> float:
        return self.devices[executor].sustained_flops_per_s

    def incoming(self, executor: int) -> Link | None:
        """From the coordinator; None where the two share a machine."""
        return self._link(self.coordinator, self.devices[executor].name)

    def outgoing(self, executor: int) -> Link | None:
        """To the coordinator; None where the two share a machine."""
        return self._link(self.devices[executor].name, self.coordinator)

    def between_s(self, source: int, target: int, size_bytes: float) -> float:
        """Seconds of so many bytes from one executor to another."""
        return transfer_s(self._link(self.devices[source].name, self.devices[target].name), size_bytes)

    def check_memory(self, needed_bytes: int) -> None:
        """UserError for an executor's device with less memory than an executor holds at least."""
        for device in self.devices:
            if device.memory_bytes < needed_bytes:
                raise UserError(
                    f"fleet: device {device.name!r} has {format_size(device.memory_bytes)}, expected at least "
                    f"{format_size(needed_bytes)} for a model, its gradient, the broadcast and the sums"
                )

    def _link(self, source: str, target: str) -> Link | None:
        return None if source == target else self.fleet.link(source, target)


def transfer_s(link: Link | None, size_bytes: float) -> float:
    """Seconds of a message; none without a link."""
    return 0.0 if link is None else link.transfer_s(size_bytes)


def executor_fleet(name: str, coordinator: str, executors: int) -> ExecutorFleet:
    """The first `executors` of the fleet's devices, taken from its regions in turn, or with 0 all of them.

    `name` is a built-in fleet or the path of a fleet file; `coordinator` is a device's name, or "" for the first one.
    UserError for an unknown name, and for a fleet with fewer devices than executors.
    """
    fleet = resolve_fleet(name)
    if executors > len(fleet.devices):
        raise UserError(
            f"fleet: {name!r} has {len(fleet.devices)} devices, expected at least {executors}, one for each executor"
        )
    try:
        place = fleet.device(coordinator).name if coordinator else fleet.names[0]
    except UserError as e:
        raise UserError(f"coordinator: {e}") from None
    chosen = fleet.thin(executors) if executors else fleet
    return ExecutorFleet(fleet=fleet, devices=chosen.devices, coordinator=place)
