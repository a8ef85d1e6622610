"""Modelled links: a queue that drains at the link's bandwidth, then a delay line of its latency.

    now ─► wait until the link is free ─► bytes / bandwidth ─► latency ─► arrived
           (first come, first served)     the link is busy     overlaps with later messages

One per directed pair of devices. The runtime's emulated links follow the same two formulas:
free = max(free, now) + bytes / bandwidth, and arrival = free + latency.

Links that leave a site with a limited uplink share it: a message has left when both its link and the uplink have
passed its last byte.

    uplink   ├─ a ─┤├─ b ─┤      both leave the site at once, each over its own link
    link a   ├─── a ───┤
    link b   ├───── b ────┤      the uplink was later
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isthmus.fleet import Fleet, Link


class Transmission(NamedTuple):
    """The times at which a message's first and last bytes leave and arrive."""

    start_s: float
    sent_s: float
    arrival_start_s: float
    arrived_s: float


class Uplink:
    """The capacity that all links out of a site share. A message gets the time that earlier messages left free.

    (Rejected: a plain queue. A message that waits for its own slow link would hold up all other links.)
    """

    def __init__(self, bandwidth_bytes_per_s: float) -> None:
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._busy: list[tuple[float, float]] = []  # start and end, by start, apart from each other

    def occupy(self, now_s: float, start_s: float, size_bytes: float) -> float:
        """Return when the last byte has passed, if the first may pass at `start_s`. `now_s` never goes back."""
        left_s = size_bytes / self._bandwidth_bytes_per_s
        before = [span for span in self._busy if now_s < span[1] <= start_s]
        later = [span for span in self._busy if span[1] > start_s]
        first_s, end_s = start_s, start_s
        while later and later[0][0] < end_s + left_s:
            busy_start_s, busy_end_s = later.pop(0)
            left_s -= max(0.0, busy_start_s - end_s)
            first_s, end_s = min(first_s, busy_start_s), busy_end_s
        end_s += left_s
        self._busy = [*before, (first_s, end_s), *later]
        return end_s


class Wire:
    """One direction between two devices.

    `message_s` is the time that a message occupies the link besides its bytes. `factor` multiplies each duration.
    Messages arrive in the order in which they were sent, whatever the factors.
    """

    def __init__(
        self,
        link: Link,
        message_s: float = 0.0,
        factor: Callable[[], float] = lambda: 1.0,
        uplink: Uplink | None = None,
    ) -> None:
        self._link = link
        self._message_s = message_s
        self._factor = factor
        self._uplink = uplink
        self._free_s = 0.0
        self._last_arrival_s = 0.0

    def send(self, now_s: float, size_bytes: int) -> Transmission:
        start = max(self._free_s, now_s)
        self._free_s = start + (self._message_s + self._bytes_s(start, size_bytes)) * self._factor()
        if self._uplink:
            self._free_s = max(self._free_s, self._uplink.occupy(now_s, start, size_bytes))
        trace = self._link.trace
        latency = trace.latency_at(self._free_s) if trace else self._link.latency_s
        self._last_arrival_s = max(self._last_arrival_s, self._free_s + latency * self._factor())
        return Transmission(start, self._free_s, self._last_arrival_s - (self._free_s - start), self._last_arrival_s)

    def _bytes_s(self, start_s: float, size_bytes: int) -> float:
        if self._link.trace is not None:
            return self._link.trace.sent_s(start_s, size_bytes) - start_s
        return size_bytes / self._link.bandwidth_bytes_per_s


class Network:
    """The wires of a fleet, made when first used."""

    def __init__(self, fleet: Fleet, message_s: float, factor: Callable[[], float]) -> None:
        self._fleet = fleet
        self._message_s = message_s
        self._factor = factor
        self._wires: dict[tuple[str, str], Wire] = {}
        self._uplinks: dict[str, Uplink] = {}

    def send(self, now_s: float, source: str, target: str, size_bytes: int) -> Transmission:
        """Put a message of so many bytes on the link between two devices. UserError when the fleet has none."""
        wire = self._wires.get((source, target))
        if wire is None:
            uplink = self._uplink(source, target)
            wire = Wire(self._fleet.link(source, target), self._message_s, self._factor, uplink)
            self._wires[source, target] = wire
        return wire.send(now_s, size_bytes)

    def _uplink(self, source: str, target: str) -> Uplink | None:
        site = self._fleet.uplink(source, target)
        if site is None or site.uplink_bytes_per_s is None:
            return None
        return self._uplinks.setdefault(site.region, Uplink(site.uplink_bytes_per_s))
