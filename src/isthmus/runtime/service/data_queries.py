"""The coordinator's questions to a fleet's devices about their data."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Protocol

from isthmus.data import DataSpec
from isthmus.data.description import DataDescription, check_description
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.runtime.messages.data import CompareData, DataCompared, DataDescribed, DescribeData
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_probe import Asking
from isthmus.sanitize import sanitize

DESCRIBE_S = 3600.0
"""A device with much data reads for long. The wait ends when the device disconnects."""
COMPARE_S = 60.0
LOOK_S = 0.2


class DeviceWaiting(Asking, Protocol):
    """The fleet (`Service`)."""

    def wait_for_any(self, devices: Sequence[str], stop: Stop) -> list[str]: ...
    def wait_for(self, devices: Sequence[str], stop: Stop) -> None: ...


class FleetDataQueries:
    """As `Asks`."""

    def __init__(self, service: DeviceWaiting, stop: Stop) -> None:
        self._service, self._stop = service, stop

    def here(self, devices: Sequence[str], *, every: bool) -> list[str]:
        if every:
            self._service.wait_for(devices, self._stop)
            return list(devices)
        return self._service.wait_for_any(devices, self._stop)

    def describe(
        self, devices: Sequence[str], data: DataSpec, *, heldout: bool
    ) -> dict[str, DataDescription | IsthmusError]:
        """All at the same time, in threads that nobody waits for once that is to stop."""
        said: dict[str, DataDescription | IsthmusError] = {}

        def ask(device: str) -> None:
            try:
                said[device] = self._described(device, data, heldout=heldout)
            except IsthmusError as e:
                said[device] = e

        threads = [threading.Thread(target=ask, args=(device,), daemon=True) for device in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                self._stop.check()
                thread.join(LOOK_S)
        return {device: said[device] for device in devices}

    def _described(self, device: str, data: DataSpec, *, heldout: bool) -> DataDescription:
        asked = DescribeData(run=secrets.token_hex(8), data=data, heldout=heldout)
        answer = self._service.ask(device, asked, DataDescribed, DESCRIBE_S)
        if answer.description is None:
            raise UserError(f"device {device!r}: {sanitize(answer.failure)}")
        try:
            check_description(answer.description, heldout=heldout)
        except UserError as e:
            raise UserError(f"device {device!r}: its description of the data: {e}") from None
        if answer.description.digests.keys() != ({"train", "heldout"} if heldout else {"train"}):
            raise UserError(f"device {device!r}: its description of the data: digests: expected one for each split")
        return answer.description

    def are_equal(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """One shows a proof, the other checks it and shows its own, which the first one checks."""
        shown = ""
        for asked, against in ((one, other), (other, one), (one, other)):
            answer = self._compared(asked, against, shown)
            if not answer.equal:
                return False
            shown = answer.proof
        return True

    def _compared(self, asked: tuple[str, str], against: tuple[str, str], shown: str) -> DataCompared:
        (device, own), (name, others) = asked, against
        answer = self._service.ask(
            device,
            CompareData(run=secrets.token_hex(8), device=device, other=name, own=own, others=others, shown=shown),
            DataCompared,
            COMPARE_S,
        )
        if answer.failure:
            raise PeerError(f"device {device!r}: {sanitize(answer.failure)}")
        return answer
