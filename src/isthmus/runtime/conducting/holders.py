"""What devices say of a job's data: their descriptions, and which of them hold the same samples.

The coordinator opens no file of the data. Whoever reads them compares its own with another reader's, by digests that
mean nothing to the coordinator (`isthmus.runtime.identity.concealed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from isthmus.data import DataSpec, Split
from isthmus.data.description import DataDescription, difference
from isthmus.errors import PeerError, UserError

NAMED: Mapping[Split, str] = {"train": "training", "heldout": "held-out"}


class Asks(Protocol):
    """Who can ask devices about data."""

    def here(self, devices: Sequence[str], *, every: bool) -> list[str]:
        """Those of them that can be asked: at least one, or every one. Waits until there are."""
        ...

    def describe(self, devices: Sequence[str], data: DataSpec, *, heldout: bool) -> dict[str, DataDescription]:
        """By device. UserError, which names the device and the field, for data that one of them does not have, may not
        read, or describes as no data are; PeerError for a device that does not answer."""
        ...

    def are_equal(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Whether two devices have equal samples, by their names and digests. PeerError for one that does not
        answer."""
        ...


class Holders:
    """Those devices of one job that have described its data, by name in the order in which they were asked."""

    def __init__(self, asks: Asks, data: DataSpec, *, heldout: bool, alike: bool = True) -> None:
        """`heldout`: whether the job needs held-out samples. With `alike` all of them must have the same samples;
        without, each has its own, of the same columns."""
        self._asks = asks
        self._data = msgspec.structs.replace(data, description="")  # a path of the coordinator's
        self._heldout = heldout
        self._alike = alike
        self.described: dict[str, DataDescription] = {}

    def ask(self, devices: Sequence[str], *, every: bool = False) -> None:
        """Have the devices describe their data, at least one of them, or every one that was not asked before.

        UserError names the devices whose data cannot be used together; PeerError one that does not answer.
        """
        asked = [d for d in self._asks.here(devices, every=every) if d not in self.described]
        for device, found in self._asks.describe(asked, self._data, heldout=self._heldout).items():
            self._compare(device, found)
            self.described[device] = found

    def remember(self, described: Mapping[str, DataDescription]) -> None:
        """What was found before, by another process."""
        self.described |= described

    def _compare(self, device: str, found: DataDescription) -> None:
        for other, known in self.described.items():
            if (text := difference(known, found, counts=self._alike)) is not None:
                raise UserError(f"data: devices {other!r} and {device!r} differ: {text}, expected the same on both")
        if not self._alike:
            return
        silent: list[str] = []
        for other in self.described:
            try:
                self._compare_samples(other, device, found)
            except PeerError as e:
                silent.append(str(e))
            else:
                return
        if silent:
            raise PeerError(
                f"data: device {device!r} cannot be compared with who read them before: {'; '.join(silent)}"
            )

    def _compare_samples(self, other: str, device: str, found: DataDescription) -> None:
        known = self.described[other]
        for split, digest in found.digests.items():
            if split in known.digests and not self._asks.are_equal((other, known.digests[split]), (device, digest)):
                raise UserError(
                    f"data: devices {other!r} and {device!r} have different {NAMED[split]} samples, expected the same: "
                    "other files, or for `stdlib` another version of Python"
                )


def agreed(described: Mapping[str, DataDescription]) -> DataDescription:
    """Of holders of the same samples: any one's, without digests."""
    return msgspec.structs.replace(next(iter(described.values())), digests={})
