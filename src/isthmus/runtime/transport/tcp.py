"""TCP between machines: connections that fail for a temporary reason, such as a full waiting room, are tried again;
long links send by BBR, where the kernel has it and lets us choose it.

Cubic takes every loss for congestion and waits a round trip to grow again; over a long link that leaves most of it
unused. On short ones the kernel's own choice stays.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import Protocol, TypeVar

from isthmus.errors import PeerError

WAITS_S = (0.2, 0.5, 1.0, 2.0)  # between attempts; the last one again and again
Reached = TypeVar("Reached")


class Unreached(PeerError):
    """Nobody answered. Another attempt may do better."""


class HungUp(Unreached):
    """The other side closed the connection before it knew its caller, as a busy coordinator does."""


def until_reached(attempt: Callable[[], Reached], within_s: float, passing: type[Unreached] = HungUp) -> Reached:
    """Return the result of the first attempt that succeeds. Raises the error of the last one when the time is over, and
    at once an error that is not `passing`."""
    deadline_s = time.monotonic() + within_s
    for wait_s in chain(WAITS_S, repeat(WAITS_S[-1])):
        try:
            return attempt()
        except passing:
            if time.monotonic() + wait_s >= deadline_s:
                raise
        time.sleep(wait_s)
    raise AssertionError("waits do not end")


_BBR = b"bbr"
MOST_TRIP_S = 60.0  # a longer one stands for none that was measured
LONG_S = 0.01  # round trips of long links
_RTT = struct.Struct("=68xI")  # where `struct tcp_info` of Linux has the smoothed round trip, in microseconds
_LEAST_RTT = struct.Struct("=148xI")  # and the least one


class HasSocketOptions(Protocol):
    """A socket, or what has one's options."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def round_trip_s(connection: HasSocketOptions) -> float | None:
    """Return the time as the kernel sees it; None where it does not say."""
    return _seconds(connection, _RTT)


def least_round_trip_s(connection: HasSocketOptions) -> float | None:
    """Without what the other side waited before it acknowledged."""
    found = _seconds(connection, _LEAST_RTT)
    return None if found is None or found > MOST_TRIP_S else found


def _seconds(connection: HasSocketOptions, field: struct.Struct) -> float | None:
    with contextlib.suppress(OSError, AttributeError, struct.error):
        return int(field.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))[0]) / 1e6
    return None


def use_bbr(connection: socket.socket) -> None:
    """Choose how a connected stream sends. Nothing is said where it cannot be chosen."""
    trip_s = round_trip_s(connection)
    if trip_s is not None and trip_s >= LONG_S:
        with contextlib.suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _BBR)


def uses_bbr(connection: HasSocketOptions) -> bool:
    with contextlib.suppress(OSError, AttributeError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0] == _BBR
    return False
