"""Connections that are not authenticated yet. Their number is bounded: a new one replaces the oldest."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Generator

MOST_SILENT = 64
"""Connections at once that have not sent a TLS hello yet."""
MOST_SPEAKING = 64
"""Connections at once in the TLS handshake."""
MOST_FROM_ONE = 16
"""Of each kind, from one address: a single unknown peer cannot take all places."""
UNKNOWN_S = 20.0
"""Time limit of the whole authentication: a peer that sends a byte at times cannot keep its place."""


class Unauthenticated:
    """A handle of a connection that stays valid after TLS has taken over the socket."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        """OSError if too many files are open."""
        self.address = address
        self._twin = connection.dup()

    def cut(self) -> None:
        """Shut the connection down. Code that waits for it sees its end."""
        with contextlib.suppress(OSError):
            self._twin.shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        self._twin.close()


class PendingConnections:
    """Two bounded groups: silent connections, and connections in the TLS handshake. Silent ones never take the places
    of the others.

    When a group is full its oldest connection is cut. (Rejected: refuse the newest. A peer that keeps connections open
    could then shut out everybody else.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._silent: dict[Unauthenticated, None] = {}
        """The oldest first; also below."""
        self._speaking: dict[Unauthenticated, None] = {}
        self._cut = False

    def enter(self, unknown: Unauthenticated) -> None:
        self._make_room(self._silent, MOST_SILENT, unknown)

    def speaks(self, unknown: Unauthenticated) -> None:
        """It has asked for TLS."""
        with self._lock:
            self._silent.pop(unknown, None)
        self._make_room(self._speaking, MOST_SPEAKING, unknown)

    def leave(self, unknown: Unauthenticated) -> None:
        """Also of one that was cut."""
        with self._lock:
            self._silent.pop(unknown, None)
            self._speaking.pop(unknown, None)

    def crowded(self) -> bool:
        """Whether any was cut for another since this was asked last."""
        with self._lock:
            cut, self._cut = self._cut, False
        return cut

    @contextlib.contextmanager
    def bounded(self, unknown: Unauthenticated) -> Generator[None]:
        """Whatever is done with the connection inside ends in time: timeouts bound each wait, not their sum."""
        timer = threading.Timer(UNKNOWN_S, unknown.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.leave(unknown)
            unknown.let_go()

    def _make_room(self, room: dict[Unauthenticated, None], most: int, unknown: Unauthenticated) -> None:
        with self._lock:
            same = [other for other in room if other.address == unknown.address]
            oldest = same[0] if len(same) >= MOST_FROM_ONE else next(iter(room)) if len(room) >= most else None
            if oldest is not None:
                del room[oldest]
                self._cut = True
            room[unknown] = None
        if oldest is not None:
            oldest.cut()
