"""A device's answers about its data: what they are like, and whether another device's are equal."""

from __future__ import annotations

import threading
from collections.abc import Callable

from isthmus.errors import IsthmusError, PeerError
from isthmus.runtime.identity.blinded_digests import proof, proves
from isthmus.runtime.messages.data import CompareData, DataCompared, DataDescribed, DescribeData
from isthmus.runtime.processes.data_description import MOST_REASON, described_at
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.sanitize import MOST_SHOWN, sanitize

MOST_UNPROVED = 16
"""Other parties' digests that a device has shown a proof for, or was shown a wrong one of, and that were not proved to
be of equal data: each could be a guess by somebody who does not have them. With so many it compares no more."""


class DataAnswers:
    """Of one device, for as long as it is in the fleet. Any thread."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._given: set[str] = set()
        """Digests that this device has told."""
        self._unproved: set[tuple[str, str]] = set()
        """Own digest, and the other party's."""
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
        """Who shows first has proved nothing to itself until it is shown something too."""
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
