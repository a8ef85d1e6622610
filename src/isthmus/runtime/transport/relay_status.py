"""The status of relayed connections between devices."""

from __future__ import annotations

import msgspec


class RelayedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A relayed connection between two devices, by name."""

    devices: tuple[str, str]
    carried_bytes: int  # both ways
    latency_s: float | None
    """One way, from the kernel's round-trip times of both halves; None if the kernel does not report them."""
