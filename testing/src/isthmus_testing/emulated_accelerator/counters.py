"""Counters of the host's use of a device: work that it queued, bytes that it copied, and places where it waited."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Generator
from typing import Literal

import msgspec

from isthmus_testing.emulated_accelerator.misuse import RefusedWait, caller, shown

Wait = Literal["implicit copy", "host synchronization", "event wait"]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of an emulated accelerator: operations, copies and synchronisations so far."""

    kernels: int
    copies: int  # between the device and a host buffer, without waiting
    copied_bytes: int
    implicit_copies: int  # between the device and other memory of the host, or such that the host waits for them
    implicit_bytes: int
    host_synchronizations: int
    """The host waited for all work of a stream or of the device: an implicit copy, `item()`, an operator whose result's
    shape depends on values, `synchronize`."""
    event_waits: int  # the host waited for one event
    places: dict[str, int]  # implicit copies and waits: the number of times by operation and place


class Counters:
    """Counters of one device, by thread. The caller holds the lock."""

    def __init__(self, refused: Collection[Wait]) -> None:
        self._numbers: dict[int, Counter[str]] = {}
        self._places: dict[int, Counter[str]] = {}
        self._refused: Counter[Wait] = Counter(refused)

    def add(self, name: str, number: int = 1) -> None:
        thread = threading.get_ident()
        if thread not in self._numbers:
            self._numbers[thread] = Counter()
        self._numbers[thread][name] += number

    def wait(self, kind: Wait, what: str, number_bytes: int = 0) -> None:
        """RefusedWait where the kind is refused."""
        where = f"{kind}: {what} ({shown(caller())})"
        self.add(kind)
        self.add("implicit bytes", number_bytes)
        self._places.setdefault(threading.get_ident(), Counter())[where] += 1
        if self._refused[kind]:
            raise RefusedWait(f"{where}: expected none here")

    @contextlib.contextmanager
    def refusing(self, kinds: tuple[Wait, ...]) -> Generator[None]:
        self._refused.update(kinds)
        try:
            yield
        finally:
            self._refused.subtract(kinds)

    def counts(self, thread: int | None) -> Counts:
        numbers = sum((c for t, c in self._numbers.items() if thread in (None, t)), Counter[str]())
        places = sum((c for t, c in self._places.items() if thread in (None, t)), Counter[str]())
        return Counts(
            kernels=numbers["kernel"],
            copies=numbers["copy"],
            copied_bytes=numbers["copied bytes"],
            implicit_copies=numbers["implicit copy"],
            implicit_bytes=numbers["implicit bytes"],
            host_synchronizations=numbers["host synchronization"],
            event_waits=numbers["event wait"],
            places=dict(places),
        )

    def reset(self) -> None:
        self._numbers.clear()
        self._places.clear()
