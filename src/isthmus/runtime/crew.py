"""Who works for a run: device processes started here, or devices that joined a fleet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from isthmus.runtime.launcher import Launcher, Place
from isthmus.runtime.listener import Listener
from isthmus.runtime.reception import Reception

Ended = Callable[[], Mapping[str, str]]
"""Of which devices the process has ended otherwise than well, and how."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call to work."""

    run: str
    devices: tuple[str, ...]
    patience_s: float
    threads: int
    logs: Path
    """Where what devices write to standard error goes, as far as it is written on this machine."""


class Crew(Protocol):
    def at_work(self, call: Call, reception: Reception) -> AbstractContextManager[Ended]:
        """While inside, the devices of the call come to the reception, each on a connection of its own."""
        ...


class LocalCrew(msgspec.Struct, frozen=True, kw_only=True):
    """A process for each device, on this machine or in a place on it."""

    host: str = "127.0.0.1"
    """Address that the coordinator listens on."""
    places: Mapping[str, Place] = {}
    """Per device; loopback where a device is not named."""
    trusted_network: bool = False
    """Plain TCP beyond loopback: for network namespaces of our own."""

    @contextlib.contextmanager
    def at_work(self, call: Call, reception: Reception) -> Generator[Ended]:
        listener = Listener(self.host, trusted_network=self.trusted_network, patience_s=call.patience_s)
        listener.start(reception.greet)
        places = {device: self.places.get(device, Place()) for device in call.devices}
        address = f"{self.host}:{listener.port}"
        try:
            with Launcher(
                places, address, call.run, patience_s=call.patience_s, threads=call.threads, logs=call.logs
            ) as launcher:
                yield launcher.ended
        finally:
            listener.close()
