"""How TCP sends over long links: by BBR, where the kernel has it and lets us choose it.

Cubic takes every loss for congestion and waits a round trip to grow again; over a long link that leaves most of it
unused. On short ones the kernel's own choice stays.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Protocol

_BBR = b"bbr"
LONG_S = 0.01
"""Round trips of long links."""
_RTT = struct.Struct("=68xI")
"""Where `struct tcp_info` of Linux has the smoothed round trip, in microseconds."""


class HasSocketOptions(Protocol):
    """A socket, or what has one's options."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def round_trip_s(connection: HasSocketOptions) -> float | None:
    """As the kernel sees it; None where it does not say."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        return int(_RTT.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))[0]) / 1e6
    return None


def use_bbr(connection: socket.socket) -> None:
    """Choose how a connected stream sends. Nothing is said where it cannot be chosen."""
    trip_s = round_trip_s(connection)
    if trip_s is not None and trip_s >= LONG_S:
        with contextlib.suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _BBR)


def uses_bbr(connection: HasSocketOptions) -> bool:
    """Whether it sends by BBR."""
    with contextlib.suppress(OSError, AttributeError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0] == _BBR
    return False
