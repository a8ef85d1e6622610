"""TLS 1.3 on a connected socket, both sides verified; and a connection that two threads can share."""

from __future__ import annotations

import errno
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from isthmus.errors import PeerError, UserError
from isthmus.runtime.identity import Identity, Party, party_of
from isthmus.runtime.transport.tcp import HungUp, use_bbr

RECORD_BYTES = 1 << 14  # the most that one TLS record holds
HANDSHAKE_RECORD = b"\x16\x03"  # how each begins that asks for TLS: its content type, and the major version
RECORD_HEADER_BYTES = 5  # kind, version, length (u16)

_UNKNOWN_AUTHORITY = (18, 19, 20, 21)  # openSSL's numbers for a certificate that no authority known here has signed


class Connection(Protocol):
    """The operations of a connected stream that a channel needs: a socket has them all."""

    @property
    def family(self) -> int: ...
    def setsockopt(self, level: int, name: int, value: int, /) -> None: ...
    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...
    def settimeout(self, timeout_s: float | None, /) -> None: ...
    def sendmsg(self, pieces: Sequence[memoryview], /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def dup(self) -> Connection:
        """The same stream with a timeout of its own."""
        ...

    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class _Shared:
    """One TLS session and who is in it. OpenSSL's object is not made for two threads at once: every call of it holds
    the lock, no wait does. (Rejected: a connection for each direction, which doubles handshakes and open ports.)"""

    def __init__(self, session: ssl.SSLSocket) -> None:
        self.session = session
        self.lock = threading.Lock()
        self.closed = False
        self.waiting = 0  # threads that wait for the socket: until they are gone its number must not become another's

    def end_if_unused(self) -> None:
        """With the lock held."""
        if self.closed and not self.waiting:
            self.session.close()


class TlsConnection:
    """A TLS session as a blocking stream, with the part of a socket's interface that channels use."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._timeout_s: float | None = None

    @property
    def family(self) -> int:
        return self._shared.session.family

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        self._shared.session.setsockopt(level, name, value)

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        return self._shared.session.getsockopt(level, name, size)

    def settimeout(self, timeout_s: float | None, /) -> None:
        self._timeout_s = timeout_s

    def dup(self) -> TlsConnection:
        twin = TlsConnection(self._shared)
        twin._timeout_s = self._timeout_s
        return twin

    def sendmsg(self, pieces: Sequence[memoryview], /) -> int:
        """Sends all of it; the timeout is for each record. TimeoutError, OSError."""
        sent = 0
        for record in records(pieces):
            # A record that was begun must be ended with the same bytes: never give up on one and go on.
            at = 0
            while at < record.nbytes:
                at += self._when_ready(self._shared.session.send, record[at:])
            sent += at
        return sent

    def recv_into(self, buffer: memoryview, /) -> int:
        """At most one record; 0 when the other side has closed. TimeoutError, OSError."""
        return self._when_ready(self._shared.session.recv_into, buffer)

    def _when_ready(self, act: Callable[[memoryview], int], data: memoryview) -> int:
        shared = self._shared
        deadline_s: float | None = None
        while True:
            with shared.lock:
                if shared.closed:
                    raise OSError(errno.EBADF, "closed here")
                try:
                    return act(data)
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
                shared.waiting += 1
            try:
                if self._timeout_s is not None and deadline_s is None:
                    deadline_s = time.monotonic() + self._timeout_s
                self._wait(wanted, deadline_s)
            finally:
                with shared.lock:
                    shared.waiting -= 1
                    shared.end_if_unused()

    def _wait(self, wanted: int, deadline_s: float | None) -> None:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        poll = select.poll()
        poll.register(self._shared.session, wanted)
        if (left_s is not None and left_s <= 0) or not poll.poll(None if left_s is None else left_s * 1000):
            raise TimeoutError

    def peer_address(self) -> tuple[str, int]:
        """Return the address of the other end, as it is seen from here. OSError."""
        host, port, *_ = self._shared.session.getpeername()
        return host, port

    def hung_up(self) -> bool:
        """Return whether the other side has ended the stream, as far as the kernel knows."""
        with self._shared.lock:
            if self._shared.closed:
                return True
            poll = select.poll()
            poll.register(self._shared.session, getattr(select, "POLLRDHUP", 0))
            return bool(poll.poll(0))

    def bare(self) -> socket.socket:
        """The stream without TLS from here on; the other side does the same at the same time. Nobody else may use the
        connection meanwhile, nor later. OSError."""
        shared = self._shared
        with shared.lock:
            if shared.closed:
                raise OSError(errno.EBADF, "closed here")
            shared.session.settimeout(self._timeout_s)
            shared.session.unwrap()  # reads no byte beyond the other side's end of TLS
            shared.closed = True
            return socket.socket(fileno=shared.session.detach())

    def shutdown(self, how: int, /) -> None:
        # SSLSocket.shutdown forgets the session, and what another thread sends after that goes out unencrypted.
        self._shared.closed = True
        socket.socket.shutdown(self._shared.session, how)

    def close(self) -> None:
        with self._shared.lock:
            self._shared.closed = True
            self._shared.end_if_unused()


def records(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes in order, in records; a small piece shares one with the piece after it."""
    held = b""
    for piece in pieces:
        start = 0
        if held:
            start = min(piece.nbytes, RECORD_BYTES - len(held))
            held += bytes(piece[:start])
            if len(held) < RECORD_BYTES:
                continue
            yield memoryview(held)
            held = b""
        if piece.nbytes - start < RECORD_BYTES:
            held = bytes(piece[start:])
            continue
        while start < piece.nbytes:
            yield piece[start : start + RECORD_BYTES]
            start += RECORD_BYTES
    if held:
        yield memoryview(held)


def await_hello(connection: socket.socket) -> None:
    """Until the other side's first TLS record is here in whole; nothing of it is read. What is no TLS at all is left
    to TLS to refuse. OSError: the other side left, or took longer than the socket's timeout."""
    header = _peeked(connection, RECORD_HEADER_BYTES)
    if len(header) == RECORD_HEADER_BYTES and header.startswith(HANDSHAKE_RECORD):
        length = min(int.from_bytes(header[-2:]), RECORD_BYTES)
        _peeked(connection, RECORD_HEADER_BYTES + length)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _peeked(connection: socket.socket, size_bytes: int) -> bytes:
    """So many bytes as soon as they are here; less at the end of the stream. Single bytes do not wake it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
    return connection.recv(size_bytes, socket.MSG_PEEK)


def secure_accepted(
    connection: socket.socket, identity: Identity, *, unknown_peers: bool
) -> tuple[TlsConnection, Party | None]:
    """The server's end. None for one that shows no certificate, which only `unknown_peers` allows; every other is of
    the fleet and in date. PeerError."""
    context = _context(identity, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no session is resumed: each connection shows its certificate
    context.verify_mode = ssl.CERT_OPTIONAL if unknown_peers else ssl.CERT_REQUIRED
    return _shake_hands(connection, context, server_side=True)


def secure_dialled(connection: socket.socket, identity: Identity, expected: Party) -> TlsConnection:
    """The client's end. PeerError unless the other side is the expected party; an empty id stands for any."""
    secured, party = _shake_hands(connection, _context(identity, ssl.PROTOCOL_TLS_CLIENT), server_side=False)
    try:
        expect(party, expected)
    except PeerError:
        secured.close()
        raise
    return secured


def expect(party: Party | None, expected: Party) -> None:
    """PeerError unless it is the expected party; an empty id stands for any."""
    if party is None or party.role != expected.role or expected.id not in ("", party.id):
        got = "nobody that is certified" if party is None else f"{party.role} {party.id}"
        raise PeerError(f"identifies itself as {got}, expected {expected.role} {expected.id or 'of the fleet'}")


def secure_unknown(connection: socket.socket, authority_pem: str | None) -> TlsConnection:
    """The client's end for a device without a certificate. With None the server is not verified: send it nothing, and
    trust nothing that it sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE if authority_pem is None else ssl.CERT_REQUIRED
    if authority_pem is not None:
        context.load_verify_locations(cadata=authority_pem)
    secured, party = _shake_hands(connection, context, server_side=False)
    if authority_pem is not None:
        expect(party, Party("coordinator", ""))
    return secured


def _context(identity: Identity, side: int) -> ssl.SSLContext:
    """Made anew for each connection: certificates are renewed."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # parties are known by their keys, and move from address to address
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(cafile=str(identity.authority_path))
        context.load_cert_chain(identity.certificate_path, identity.key_path)
    except (OSError, ssl.SSLError) as e:
        raise UserError(f"identity {identity.folder}: cannot be used: {e.strerror or e}") from None
    return context


def _shake_hands(
    connection: socket.socket, context: ssl.SSLContext, *, server_side: bool
) -> tuple[TlsConnection, Party | None]:
    """The socket's timeout bounds each of its steps; afterwards it is the TLS connection's alone."""
    try:
        session = context.wrap_socket(connection, server_side=server_side)
    except ssl.SSLCertVerificationError as e:
        connection.close()
        another = "another fleet's: " if e.verify_code in _UNKNOWN_AUTHORITY else ""
        raise PeerError(f"its certificate is refused: {another}{e.verify_message}") from None
    except OSError as e:
        connection.close()
        gone = isinstance(e, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
        raise (HungUp if gone else PeerError)(f"no TLS connection: {e.strerror or e}") from None
    try:
        der = session.getpeercert(binary_form=True)
        party = party_of(der) if der is not None and context.verify_mode != ssl.CERT_NONE else None
    except PeerError:
        session.close()
        raise
    use_bbr(session)
    session.setblocking(False)
    return TlsConnection(_Shared(session)), party
