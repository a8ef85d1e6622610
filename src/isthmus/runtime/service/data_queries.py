"""The coordinator's questions to a fleet's devices about their data, and a device's answers: what they are like, and
whether another device's are equal."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

from isthmus.data import DataSpec
from isthmus.data.description import DataDescription, check_description
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.runtime.identity.blinded_digests import proof, proves
from isthmus.runtime.messages.fleet import CompareData, DataCompared, DataDescribed, DescribeData
from isthmus.runtime.processes.data_description import MOST_REASON, described_at
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_probe import Asking
from isthmus.sanitize import MOST_SHOWN, sanitize

DESCRIBE_S = 3600.0  # a device with much data reads for long. The wait ends when the device disconnects.
COMPARE_S = 60.0
LOOK_S = 0.2


class FleetDataQueries:
    """Answers `DataQueries` from a fleet's devices."""

    def __init__(self, service: Asking, stop: Stop) -> None:
        self._service, self._stop = service, stop

    def here(self, devices: Sequence[str], *, every: bool) -> list[str]:
        return self._service.wait_for(devices, self._stop, every=every)

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


MOST_UNPROVED = 16
"""Other parties' digests that a device has shown a proof for, or was shown a wrong one of, and that were not proved to
be of equal data: each could be a guess by somebody who does not have them. With so many it compares no more."""


class DataAnswers:
    """The answers of one device, for as long as it is in the fleet. Any thread."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._given: set[str] = set()  # digests that this device has told
        self._unproved: set[tuple[str, str]] = set()  # own digest, and the other party's
        self._opening = threading.Lock()

    def describe(self, asked: DescribeData, place: ProcessPlace) -> DataDescribed:
        """Opens the data in a process of their own, one after another."""
        with self._opening:
            try:
                found = described_at(place, asked.data, heldout=asked.heldout)
            except (IsthmusError, OSError) as e:
                self._log(f"cannot describe data of kind {sanitize(asked.data.kind)[:MOST_SHOWN]}: {e}")
                return DataDescribed(run=asked.run, failure=str(e)[:MOST_REASON])
        with self._lock:
            self._given |= set(found.digests.values())
        self._log(f"described data of kind {asked.data.kind}: {found.train} samples, no content")
        return DataDescribed(run=asked.run, description=found)

    def compare(self, asked: CompareData, key: bytes) -> DataCompared:
        """Compare digests. Who shows first has proved nothing to itself until it is shown something too."""
        pair = (asked.own, asked.others)
        with self._lock:
            if asked.own not in self._given:
                return DataCompared(run=asked.run, failure="was asked to compare data that it has not described")
            if len(self._unproved) >= MOST_UNPROVED and pair not in self._unproved:
                return DataCompared(
                    run=asked.run,
                    failure=(
                        f"compares its data no more, as {MOST_UNPROVED} comparisons failed or are open: its owner "
                        "may start `isthmus join` again"
                    ),
                )
            self._unproved.add(pair)
            try:
                own = proof(key, asked.device, asked.other, *pair)
                equal = not asked.shown or proves(asked.shown, key, asked.other, asked.device, asked.others, asked.own)
            except (PeerError, ValueError) as e:
                return DataCompared(run=asked.run, failure=f"cannot compare its data: {e}")
            if not equal:
                self._log(f"the data of device {sanitize(asked.other)[:MOST_SHOWN]} are not equal to this one's")
                return DataCompared(run=asked.run, equal=False)
            if asked.shown:
                self._unproved.discard(pair)
            return DataCompared(run=asked.run, proof=own)
