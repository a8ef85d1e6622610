"""The present status of a coordinator, in its state folder, for `isthmus status`: written anew every second."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from isthmus.errors import UserError
from isthmus.reading import read_json
from isthmus.runtime.identity.files import write_private
from isthmus.runtime.transport.relay_status import RelayedLink

_FILE = "status.json"
FRESH_S = 5.0  # older news are of a coordinator that is gone


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    id: str
    hardware: str = ""  # as it calls it; empty where it does not say
    working: bool  # whether a process of it works for a run


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A connection between two devices at work, and what it costs."""

    devices: tuple[str, str]  # who dialled is the first
    relayed: bool
    latency_s: float | None  # one way, as the kernel saw it when the plan began: of both halves, where it is relayed
    streams: int = 1
    bbr: bool = False  # whether who dialled sends by it
    carried_bytes: int = 0  # both ways, of a relayed one: so much came to the coordinator, and left it again


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s` is in seconds since 1970."""

    at_s: float
    port: int
    devices: tuple[DeviceStatus, ...] = ()
    links: tuple[LinkStatus, ...] = ()  # between devices that work for a run now
    relayed: tuple[RelayedLink, ...] = ()  # connections that the coordinator copies now, also those of probes
    awaited: tuple[str, ...] = ()  # devices that must join before the run begins, as is shown of them

    @property
    def fresh(self) -> bool:
        return abs(time.time() - self.at_s) < FRESH_S


def write_status(folder: Path, status_file: CoordinatorStatus) -> None:
    write_private(folder / _FILE, msgspec.json.encode(status_file), durable=False)


def remove_status(folder: Path) -> None:
    (folder / _FILE).unlink(missing_ok=True)


def read_status(folder: Path) -> CoordinatorStatus | None:
    """None where no coordinator was ever started, or an older version of it."""
    try:
        return read_json(folder / _FILE, CoordinatorStatus)
    except (FileNotFoundError, UserError):
        return None
