"""Options of a device process: one struct, from the command that starts it to the links of its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from isthmus.engines import EngineName
from isthmus.fleet import Link
from isthmus.wire_types import WorkerRole


class DevicePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device's process computes, and how others reach it."""

    host: str = "127.0.0.1"  # address that it listens on for other devices
    port: int = 0  # 0: any that is free
    address: str = ""  # how others reach that address, where it is not the same
    trusted_network: bool = False  # plain TCP beyond loopback
    relayed: bool = False  # other devices reach it only through the coordinator's relay
    island: Path | None = None  # where its ranks meet, if the device has several; None for one
    ranks: int = 1
    sharded: bool = False  # each of them holds its part of a stage's weights
    accelerator: str = "cpu"  # where it computes, as `isthmus.accelerators` names it
    engine: EngineName = "torch"  # which library computes its stages
    data_kinds: tuple[str, ...] | None = None
    """Kinds of data that the device's owner allows a coordinator to name; None: all that are installed."""
    weights_from: tuple[str, ...] = ()  # URLs below which another owner's coordinator may have this device read weights
    checkpoints_to: tuple[str, ...] = ()
    """URLs below which a coordinator may have this device write its parts of checkpoints, and read them."""
    merger: Link | None = None  # emulated, from a device that trains alone to the merger
    step_s: float = 0.0  # a step of a device that trains alone takes no less


class ProcessPlace(DevicePlace, frozen=True, kw_only=True):
    """The place of a device process, as the process that starts it knows it."""

    prefix: tuple[str, ...] = ()  # a command in front of it, as of a network namespace
    identity: Path | None = None  # a folder with key and certificate: all connections are TLS. None: plain TCP.
    local_ranks: int = 1  # ranks that are on this machine
    hardware: str = ""  # the accelerator as people call it
    data: Path | None = None  # the folder from which relative paths of data count; None: where this process runs
    memory_bytes: int | None = None
    """Bytes of this machine's memory that jobs may take, all local ranks together; None: no limit."""

    def safety(self) -> list[str]:
        """Return Python's options for a process: a fleet's device imports no code from the folder with its data."""
        return ["-P"] if self.identity is not None else []


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of a device's process, as one JSON text: paths and addresses, no secret."""

    coordinator: str  # HOST:PORT
    device: str
    timeout_s: float  # silence after which a peer is lost
    stages: int = 1  # how many it may get at once
    role: WorkerRole = "stage"
    place: ProcessPlace

    def encoded(self) -> str:
        return msgspec.json.encode(self, enc_hook=str).decode()

    @staticmethod
    def decoded(text: str) -> ProcessOptions:
        return msgspec.json.decode(text, type=ProcessOptions, dec_hook=_path)


def _path(kind: type[Any], value: object) -> Path:
    assert kind is Path, "the only type among the fields that JSON does not have"
    return Path(str(value))
