"""Where a device is, and how others reach it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.runtime.device.compute_turns import ComputeTurns
from isthmus.runtime.identity import Identity
from isthmus.runtime.identity.blinded_digests import ONE_OWNER


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device is, and how it talks to others."""

    device: str
    host: str = "127.0.0.1"
    """Address to listen on for other devices."""
    port: int = 0
    """0: any that is free."""
    address: str = ""
    """How others reach that address, where it is not the same."""
    identity: Identity | None = None
    """With one all connections are TLS; without, plain TCP."""
    trusted_network: bool = False
    """Plain TCP beyond loopback."""
    relayed: bool = False
    """Other devices reach this device only through the coordinator's relay."""
    island: Path | None = None
    """Where this process meets the other ranks of the device, if there are any."""
    ranks: int = 1
    sharded: bool = False
    """Each of them holds its part of a stage's weights."""
    accelerator: str = "cpu"
    """Where it computes, as `open_accelerator` takes it."""
    data_kinds: tuple[str, ...] | None = None
    """Kinds of data that its owner allows; None: all that are installed."""
    sharing: ComputeTurns | None = None
    """With its other stages, where it may get several."""

    @property
    def data_key(self) -> bytes:
        """The key that blinds this device's digests of samples."""
        return ONE_OWNER if self.identity is None else self.identity.data_key()
