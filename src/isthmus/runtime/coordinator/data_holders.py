"""Devices' descriptions of a job's data, and which devices hold the same samples.

The coordinator opens no data file. Devices that read data compare theirs with each other's, by digests that mean
nothing to the coordinator (`isthmus.runtime.identity.blinded_digests`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from isthmus.data import DataSpec
from isthmus.data.description import DataDescription, difference
from isthmus.errors import IsthmusError, PeerError, UserError

NAMED: Mapping[str, str] = {"train": "training", "heldout": "held-out"}
Digests = Mapping[str, Mapping[str, str]]  # digests by device and split


class UnequalData(UserError):
    """Two devices have different data."""


class DataQueries(Protocol):
    def here(self, devices: Sequence[str], *, every: bool) -> list[str]:
        """Those of them that can be asked: at least one, or every one. Waits until there are."""
        ...

    def describe(
        self, devices: Sequence[str], data: DataSpec, *, heldout: bool
    ) -> Mapping[str, DataDescription | IsthmusError]:
        """Return each device's description. UserError, which names the device and the field, for data that it does not
        have, may not read, or describes as no data are; PeerError for a device that does not answer."""
        ...

    def are_equal(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Return whether two devices have equal samples, by their names and digests. PeerError for one that does not
        answer."""
        ...


class DataHolders:
    """Devices that have described the data of one job."""

    def __init__(
        self,
        asks: DataQueries,
        data: DataSpec,
        candidates: Collection[str],
        *,
        heldout: bool,
        alike: bool = True,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`candidates` may be asked to read the data; `heldout`: whether the job needs held-out samples. With `alike`
        all holders must have the same samples; without, each has its own, of the same columns. `note` gets the name of
        cannot read them."""
        self._asks = asks
        self._data = msgspec.structs.replace(data, description="")  # a path of the coordinator's
        self.candidates = tuple(candidates)
        self._heldout = heldout
        self._alike = alike
        self._note = note
        self._taking = threading.Lock()
        self._asking: dict[str, threading.Thread] = {}  # who came while the run was under way
        self.described: dict[str, DataDescription] = {}
        """Descriptions by device, in the order in which the devices answered."""

    def ask(self, devices: Sequence[str] | None = None) -> None:
        """Have all of these devices describe the data; without any, those candidates that are here, one at least.

        Raises Unequal, which names both devices; UserError or PeerError for one of the devices that cannot be a holder,
        or where no candidate can.
        """
        here = self._asks.here(self.candidates if devices is None else devices, every=devices is not None)
        asked = [device for device in here if device not in self.described]
        failures: dict[str, IsthmusError] = {}
        for device, found in self._described(asked):
            try:
                self._take(device, found)
            except UnequalData:
                raise
            except IsthmusError as e:
                failures[device] = e
        if failures and (devices is not None or not self.described):
            raise next(iter(failures.values()))
        for failure in failures.values():
            self._note(f"{failure}; it is given no part that reads data")

    def _described(self, devices: Sequence[str]) -> Iterator[tuple[str, DataDescription | IsthmusError]]:
        if self._alike:
            yield from self._asks.describe(devices, self._data, heldout=self._heldout).items()
            return
        for device in devices:
            yield from self._asks.describe([device], self._data.at(device), heldout=self._heldout).items()

    def remember(self, described: Mapping[str, DataDescription]) -> None:
        """Take the descriptions that another process found before."""
        self.described |= described

    def is_known(self, device: str) -> bool:
        """Return whether it is known whether the device can read the data. One that may be and was not asked yet is
        asked now, beside the caller's work."""
        if device not in self.candidates or device in self.described:
            return True
        if device not in self._asking:
            thread = threading.Thread(target=self._ask_late, args=(device,), name=f"describe {device}", daemon=True)
            self._asking[device] = thread
            thread.start()
        return not self._asking[device].is_alive()

    def _ask_late(self, device: str) -> None:
        try:
            self.ask([device])
        except IsthmusError as e:
            self._note(f"{e}; it is given no part that reads data")

    def _take(self, device: str, found: DataDescription | IsthmusError) -> None:
        if isinstance(found, IsthmusError):
            raise found
        with self._taking:
            self._compare(device, found)
            self.described[device] = found

    def _compare(self, device: str, found: DataDescription) -> None:
        for other, known in self.described.items():
            if (text := difference(known, found, counts=self._alike)) is not None:
                raise UnequalData(f"data: devices {other!r} and {device!r} differ: {text}, expected the same on both")
        silent: list[str] = []
        for other in self.described if self._alike else ():
            try:
                self._compare_samples(other, device, found)
            except PeerError as e:
                silent.append(str(e))
            else:
                return
        if silent:
            raise PeerError(f"data: those of device {device!r} cannot be compared with others': {'; '.join(silent)}")

    def _compare_samples(self, other: str, device: str, found: DataDescription) -> None:
        known = self.described[other]
        for split, digest in found.digests.items():
            if split in known.digests and not self._asks.are_equal((other, known.digests[split]), (device, digest)):
                raise UnequalData(
                    f"data: devices {other!r} and {device!r} have different {NAMED[split]} samples, expected the same: "
                    "other files, or for `stdlib` another version of Python"
                )

    @property
    def digests(self) -> dict[str, dict[str, str]]:
        return {device: dict(found.digests) for device, found in dict(self.described).items()}


def agreed(described: Mapping[str, DataDescription]) -> DataDescription:
    """Return the description of any of the holders, without digests: all have the same samples."""
    return msgspec.structs.replace(next(iter(described.values())), digests={})


def _has_one_key(found: Digests) -> bool | None:
    """Return whether devices with equal data have equal digests: then they share a key, as those of one computer do.
    None where one device alone says nothing of that."""
    digests = [of.get("train", "") for of in found.values()]
    return len(set(digests)) == 1 if len(digests) > 1 else None


def unchanged(before: Digests, now: Digests) -> bool:
    """Return whether a device that had the data then has the same now; False where none of those is here, so that
    nobody can tell. Raises UserError for one that has others.

    A device's digest compares with its own of before alone; those of devices without a key of their own, with all.
    """
    same, other_keys = False, {_has_one_key(before), _has_one_key(now)} == {True, False}
    for device, digests in now.items():
        for split, digest in digests.items():
            if any(found.get(split) == digest for found in before.values()):
                same = True
            elif split in before.get(device, {}) and not other_keys:
                what = (
                    f"has other {NAMED[split]} samples than those that the run began with; or its key is another as it "
                    "joined anew, or as `isthmus train` goes on with a run of joined devices: then nobody can compare"
                )
                raise UserError(f"resume: data: device {device!r} {what}")
    return same
