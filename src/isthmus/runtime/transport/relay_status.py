"""What is notified of connections between devices that go by way of the coordinator."""

from __future__ import annotations

import msgspec


class RelayedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that is copied here, between two devices by name."""

    devices: tuple[str, str]
    carried_bytes: int
    """Both ways."""
    latency_s: float | None
    """One way, as the kernel sees its two halves; None where it does not say."""
