"""Listen, and hand on what connects: each connection in a thread of its own, authenticated before anybody sees it. The
number of those that are not yet is bounded: a new one replaces the oldest."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Callable, Generator
from functools import partial

from isthmus.errors import PeerError, UserError
from isthmus.listening import is_loopback, listening_socket, shown_address
from isthmus.runtime.identity import Identity
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.secure import Connection, await_hello, secure_accepted

CROWDED_S = 0.01
"""Pause before the next accept after a connection was cut for another. New connections get time to authenticate, and a
flood of them does not occupy a core."""
MOST_OF_ONE = 128
"""Connections at once from one authenticated peer, at 100 KB each. A working device needs a few, and up to 64 relayed
ones."""
ACCEPT_AGAIN_S = 0.1
MOST_FILES = 65_536

Greet = Callable[[SocketChannel], None]  # handles a connection, in the connection's own thread
UnknownPeer = Callable[[Connection], None]  # handles a TLS connection from a peer without a certificate, and closes it


class Listener:
    """One listening address. Without an identity it is plain TCP, which is for loopback and for trusted networks."""

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        identity: Identity | None = None,
        trusted_network: bool = False,
        timeout_s: float = 60.0,
        unknown_peer: UnknownPeer | None = None,
    ) -> None:
        """Binds; nothing is accepted before `start`. UserError for an address that cannot be bound, or that others
        could reach without TLS."""
        if identity is None and not trusted_network:
            refuse_exposure(host)
        self._identity = identity
        self._timeout_s = timeout_s
        self._unknown_peer = unknown_peer
        self._unknown_peers = PendingConnections()
        self._adopted = PendingConnections()
        """Relayed connections are counted apart, so unknown peers cannot take their places."""
        self._known: dict[str, set[SocketChannel]] = {}
        """Connections that were handed on, by the peer's id; empty without TLS."""
        self._closed = threading.Event()
        self._counting = threading.Lock()
        self._socket = listening_socket(host, port)
        self.port: int = self._socket.getsockname()[1]

    def start(self, on_connection: Greet) -> None:
        threading.Thread(target=self._accept, args=(on_connection,), name=f"accept on {self.port}", daemon=True).start()

    def adopt(self, connection: socket.socket, other: str, on_connection: Greet) -> None:
        """Take a connection as if it had been accepted here: for what was dialled from here on somebody else's
        behalf."""
        self._receive(connection, other, other, self._adopted, on_connection)

    def close(self) -> None:
        """Accept nobody more; connections that were handed on stay."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept that waits in its thread: close does not
        self._socket.close()

    def cut(self, peer: str | None = None) -> None:
        """Close the connections that were handed on, of the peer with this id or of all."""
        with self._counting:
            channels = [c for id, known in self._known.items() if peer in (None, id) for c in known]
        for channel in channels:
            channel.close()

    def _accept(self, on_connection: Greet) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:  # also of a connection that is gone already, or while this process has too many files open
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                continue
            self._receive(
                connection, str(address[0]), shown_address(address[0], address[1]), self._unknown_peers, on_connection
            )
            if self._unknown_peers.crowded():
                self._closed.wait(CROWDED_S)

    def _receive(
        self, connection: socket.socket, address: str, other: str, rooms: PendingConnections, on_connection: Greet
    ) -> None:
        if self._identity is None:
            act = partial(self._attend_plain, connection, other, on_connection)
        else:
            try:
                unknown = Unauthenticated(connection, address)
            except OSError:  # this process has too many files open
                connection.close()
                return
            rooms.enter(unknown)
            act = partial(self._welcome, connection, self._identity, other, rooms, unknown, on_connection)
        threading.Thread(target=act, name=f"receive {other}", daemon=True).start()

    def _welcome(
        self,
        connection: socket.socket,
        identity: Identity,
        other: str,
        rooms: PendingConnections,
        unknown: Unauthenticated,
        on_connection: Greet,
    ) -> None:
        connection.settimeout(UNKNOWN_S)
        try:
            with rooms.bounded(unknown):
                await_hello(connection)
                rooms.speaks(unknown)
                channel = self._authenticated(connection, identity, other)
                passes = unknown.passes()
        except (OSError, PeerError):
            connection.close()
            return  # who cannot say who they are are not answered, nor written about: a scan must not fill a disk
        if channel is not None and passes:
            self._attend(channel, on_connection)
        elif channel is not None:
            channel.close()

    def _attend_plain(self, connection: socket.socket, other: str, on_connection: Greet) -> None:
        self._attend(SocketChannel(connection, other, self._timeout_s), on_connection)

    def _attend(self, channel: SocketChannel, on_connection: Greet) -> None:
        id = channel.party.id if channel.party is not None else ""
        with self._counting:
            known = self._known.setdefault(id, set())
            full = id != "" and len(known) >= MOST_OF_ONE
            if not full:
                known.add(channel)
        if full:
            channel.close()
            return
        try:
            on_connection(channel)
        finally:
            with self._counting:
                known.discard(channel)
                if not known:
                    del self._known[id]

    def _authenticated(self, connection: socket.socket, identity: Identity, other: str) -> SocketChannel | None:
        """None for an unknown peer, who has been dealt with."""
        secured, party = secure_accepted(connection, identity, unknown_peers=self._unknown_peer is not None)
        if party is not None:
            return SocketChannel(secured, other, self._timeout_s, party=party)
        assert self._unknown_peer is not None, "others have a certificate"
        secured.settimeout(UNKNOWN_S)
        try:
            self._unknown_peer(secured)
        finally:
            secured.close()
        return None


def allow_many_connections() -> None:
    """Allow as many open files as the system lets this process have: a shell's limit is often 1,024."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system with a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def refuse_exposure(host: str) -> None:
    """UserError unless the address is this machine's own: without TLS anybody who reaches it is believed."""
    if not is_loopback(host):
        raise UserError(
            f"listening on {host} without TLS: got an address that others can reach, expected 127.0.0.1; "
            "`isthmus serve` listens with TLS"
        )


MOST_SILENT = 64  # connections at once that have not sent a TLS hello yet
MOST_SPEAKING = 64  # connections at once in the TLS handshake
MOST_FROM_ONE = 16  # the most connections of each kind from one address: a single unknown peer cannot take all places
UNKNOWN_S = 20.0  # time limit of the whole authentication: a peer that sends a byte at times cannot keep its place


class Unauthenticated:
    """A handle of a connection that stays valid after TLS has taken over the socket."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        """OSError if too many files are open."""
        self.address = address
        self._twin = connection.dup()
        self._deciding = threading.Lock()
        self._cut = self._passed = False

    def cut(self) -> None:
        """Shut the connection down, if it has not passed. Code that waits for it sees its end."""
        with self._deciding, contextlib.suppress(OSError):
            if not self._passed:
                self._cut = True
                self._twin.shutdown(socket.SHUT_RDWR)

    def passes(self) -> bool:
        """It is authenticated. Whether it is in time: from now on nobody cuts it. (A device that had been admitted to a
        run, and was then cut, was lost to the run.)"""
        with self._deciding:
            self._passed = not self._cut
            return self._passed

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
        self._silent: dict[Unauthenticated, None] = {}  # the oldest first; also below
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
        """Return whether any was cut for another since this was asked last."""
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
