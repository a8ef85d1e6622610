"""Modelled links: a queue that drains at the link's bandwidth, then a delay line of its latency.

    now ─► wait until the link is free ─► bytes / bandwidth ─► latency ─► arrived
           (first come, first served)     the link is busy     overlaps with later messages

One per directed pair of devices; pairs do not share anything. The runtime's emulated links follow the same two
formulas: free = max(free, now) + bytes / bandwidth, and arrival = free + latency.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isthmus.fleet.fleet import Fleet, Link


class Transmission(NamedTuple):
    """When a message leaves and arrives, first and last byte."""

    start_s: float
    sent_s: float
    arrival_start_s: float
    arrived_s: float


class Wire:
    """One direction between two devices.

    `message_s` is the time that a message occupies the link besides its bytes. `factor` multiplies each duration.
    Messages arrive in the order in which they were sent, whatever the factors.
    """

    def __init__(self, link: Link, message_s: float = 0.0, factor: Callable[[], float] = lambda: 1.0) -> None:
        self._link = link
        self._message_s = message_s
        self._factor = factor
        self._free_s = 0.0
        self._last_arrival_s = 0.0

    def send(self, now_s: float, size_bytes: int) -> Transmission:
        start = max(self._free_s, now_s)
        busy = (self._message_s + size_bytes / self._link.bandwidth_bytes_per_s) * self._factor()
        self._free_s = start + busy
        latency = self._link.latency_s * self._factor()
        self._last_arrival_s = max(self._last_arrival_s, self._free_s + latency)
        return Transmission(start, self._free_s, self._last_arrival_s - busy, self._last_arrival_s)


class Network:
    """The wires of a fleet, made when first used."""

    def __init__(self, fleet: Fleet, message_s: float, factor: Callable[[], float]) -> None:
        self._fleet = fleet
        self._message_s = message_s
        self._factor = factor
        self._wires: dict[tuple[str, str], Wire] = {}

    def send(self, now_s: float, source: str, target: str, size_bytes: int) -> Transmission:
        """Put a message of so many bytes on the link between two devices. UserError when the fleet has none."""
        wire = self._wires.get((source, target))
        if wire is None:
            wire = Wire(self._fleet.link(source, target), self._message_s, self._factor)
            self._wires[source, target] = wire
        return wire.send(now_s, size_bytes)
