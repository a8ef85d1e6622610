"""The transport: one framed, blocking connection.

A frame is a 20-byte prefix, a msgpack header and raw tensor bytes:

    offset  0  "ISTH"            4  version   5  zero (3)   8  header bytes (u32)  12  payload bytes (u64)

Payloads are sent from the tensors' memory and received into fresh tensors, or wherever the receiver lets them land;
nothing is pickled. A header of 64 KiB or more, as one with the graph of a stage, is compressed by zlib. Sizes are
checked against caps and against the header before anything is allocated. Within a frame every wait for progress has a
deadline, reading or sending; waiting for the next frame ends when either side closes. (Rejected: asyncio streams,
gRPC and ZeroMQ cost more CPU per byte here; Gloo notices a silent party only at its timeout and cannot cancel a
receive.)
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from isthmus.accelerators.copies import Fill
from isthmus.errors import PeerError
from isthmus.listening import shown_address
from isthmus.protocol.run_messages import Arrived
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.transport.secure import Connection, TlsConnection, secure_dialled
from isthmus.runtime.transport.tcp import Unreached, round_trip_s, uses_bbr
from isthmus.session.session import BROKEN
from isthmus.training.layout import check_header, receive_buffer, unpack
from isthmus.training.stored import StoredTensor

MAGIC = b"ISTH"
VERSION = 1
PREFIX = struct.Struct(">4sB3xIQ")
CHUNK_BYTES = 1 << 20
PIECES_AT_ONCE = 16
MAX_HEADER_BYTES = 4 << 20
"""The largest header of a device: thousands of tensors. Decoded it takes about eight times as much memory."""
MAX_ASSIGNMENT_BYTES = 64 << 20
"""The largest header of the coordinator, which has the graph of a stage, or of several to be measured, in it."""
COMPRESSED_HEADER_BYTES = 1 << 16
_ZLIB = b"x"  # the first byte of what zlib writes, and of no message
MAX_PAYLOAD_BYTES = 1 << 40
COORDINATOR = Party("coordinator", "")
_DECODER = msgspec.msgpack.Decoder(AnyMessage)
"""Made on import, by one thread. What msgspec knows of a struct is seen by other threads while it is filled in: two
connections that made the first decoder at once have crashed the process."""

Guard = Callable[[AnyMessage], None]
"""Refuses a message (PeerError) after its header is read and before its payload is allocated."""

Received = tuple[AnyMessage, list[Tensor]]

Payload = Sequence[memoryview | StoredTensor]
"""A message's tensors, in order: bytes in memory, or tensors of files that are read as they leave."""

Landing = Callable[[AnyMessage, Fill], list[Tensor]]
"""Makes the tensors of a message that was checked, from bytes that come one after the other; none where they go
elsewhere."""


def in_host_memory(message: AnyMessage, fill: Fill) -> list[Tensor]:
    """A `Landing` in fresh tensors on the host."""
    found: list[Tensor] = []
    for header in message.tensors:
        flat, buffer = receive_buffer(header)
        fill(buffer)
        found.append(unpack(flat, header))
    return found


def nowhere(message: AnyMessage, fill: Fill) -> list[Tensor]:
    """A `Landing` of tensors that nobody wants any more."""
    left, memory = sum(h.nbytes for h in message.tensors), memoryview(bytearray(CHUNK_BYTES))
    for at in range(0, left, CHUNK_BYTES):
        fill(memory[: left - at])
    return []


class MessageChannel(Protocol):
    """A way to one party and back, whatever carries the frames. One thread sends, one receives; any may close."""

    other: str  # the party, as errors call it
    sent_bytes: int  # of whole frames and parts of frames, prefix and header included
    received_bytes: int

    def send(self, message: AnyMessage, payload: Payload = ()) -> int:
        """Send a frame as fast as the network takes it; returns its bytes. PeerError when it does not get through."""
        ...

    def receive(
        self, guard: Guard | None = None, idle_s: float | None = None, landing: Landing = in_host_memory
    ) -> Received | None:
        """The next frame; None when either side has closed. PeerError when it is malformed, stalls, or nothing
        comes for `idle_s` seconds."""
        ...

    def close(self) -> None:
        """End the connection at once. Also ends a receive that waits in another thread."""


class Channel(MessageChannel, Protocol):
    """A connection to one party, over which frames are streams of bytes."""

    @property
    def began_s(self) -> float:
        """Return when the frame that is being received, or was last, began to arrive."""
        ...

    def send_chunk(self, chunk: memoryview) -> None:
        """Send the next bytes of a `frame`: an emulated link spaces them."""


def frame(message: AnyMessage, payload: Payload) -> list[memoryview | StoredTensor]:
    """The frame's pieces, in order: prefix and header, then each tensor."""
    header = msgspec.msgpack.encode(message)
    if len(header) >= COMPRESSED_HEADER_BYTES:
        header = zlib.compress(header, 1)
    size = sum(p.nbytes for p in payload)
    return [memoryview(PREFIX.pack(MAGIC, VERSION, len(header), size) + header), *payload]


def chunks(pieces: Iterable[memoryview | StoredTensor], size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """The pieces' bytes in order, at most `size` at a time, without a copy of what is in memory."""
    for piece in pieces:
        if isinstance(piece, StoredTensor):
            yield from piece.pieces(size)
            continue
        for start in range(0, piece.nbytes, size):
            yield piece[start : start + size]


class SocketChannel:
    """A channel over a connected stream. `timeout_s` bounds every wait for progress within a frame."""

    def __init__(
        self,
        connection: Connection,
        other: str,
        timeout_s: float = 60.0,
        *,
        party: Party | None = None,
        most_header_bytes: int = MAX_HEADER_BYTES,
    ) -> None:
        """`party` is the authenticated peer, None for an unauthenticated one. Headers larger than `most_header_bytes`
        are refused before they are received."""
        self.other = other
        self.party = party
        self._most_header_bytes = most_header_bytes
        self.began_s = 0.0
        self._timeout_s = timeout_s
        self._socket = connection
        # A timeout belongs to a socket object: were there one only, the endless wait for the next frame in the
        # receiving thread would lift the deadline of a send. Both have one always, as blocking mode is shared.
        self._incoming = connection.dup()
        self.sent_bytes = self.received_bytes = 0
        self._missing = 0  # bytes of the frame in work that are still to come, as far as is known
        self._closed = threading.Event()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(timeout_s)
        self._incoming.settimeout(timeout_s)

    @property
    def latency_s(self) -> float | None:
        """One way, as the kernel sees it; of a relayed connection to the coordinator. None where it does not say."""
        trip_s = round_trip_s(self._socket)
        return trip_s / 2 if trip_s is not None else None

    @property
    def bbr(self) -> bool:
        """Return whether this end sends by it."""
        return uses_bbr(self._socket)

    def send(self, message: AnyMessage, payload: Payload = ()) -> int:
        pieces = frame(message, payload)
        following = chunks(pieces)
        # Header and tensors in one call: sent apart, a small message wakes the receiver twice.
        left = deque(itertools.islice(following, PIECES_AT_ONCE))
        while left:
            sent = self._send_some(list(left))
            while left and sent >= left[0].nbytes:
                sent -= left.popleft().nbytes
            if sent:
                left[0] = left[0][sent:]
            left.extend(itertools.islice(following, PIECES_AT_ONCE - len(left)))
        return sum(p.nbytes for p in pieces)

    def send_chunk(self, chunk: memoryview) -> None:
        while chunk.nbytes:
            chunk = chunk[self._send_some([chunk]) :]

    def _send_some(self, pieces: list[memoryview]) -> int:
        """Send as sendall does, but the deadline is for some progress: a slow receiver is not a dead one."""
        try:
            sent = self._socket.sendmsg(pieces)
        except TimeoutError:
            raise PeerError(f"{self.other}: accepted no data for {self._timeout_s:g} s") from None
        except OSError as e:
            raise PeerError(f"{self.other}: {BROKEN} while sending: {e.strerror or e}") from None
        self.sent_bytes += sent
        return sent

    def receive(
        self, guard: Guard | None = None, idle_s: float | None = None, landing: Landing = in_host_memory
    ) -> Received | None:
        try:
            return self._receive(guard, idle_s, landing)
        except PeerError as e:
            if self._closed.is_set():
                return None  # we hung up ourselves: the rest of the frame is nobody's fault
            raise PeerError(f"{self.other}: {e}") from None

    def _receive(self, guard: Guard | None, idle_s: float | None, landing: Landing) -> Received | None:
        """Errors do not name the party."""
        prefix = memoryview(bytearray(PREFIX.size))
        if not self._begin(prefix, idle_s):
            return None
        magic, version, header_bytes, payload_bytes = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise PeerError(f"sent {bytes(magic)!r}, expected a frame that starts with {MAGIC!r}")
        if version != VERSION:
            raise PeerError(f"frame version {version}, expected {VERSION}")
        if header_bytes > self._most_header_bytes or payload_bytes > MAX_PAYLOAD_BYTES:
            raise PeerError(
                f"frame of {header_bytes} + {payload_bytes} bytes, "
                f"expected at most {self._most_header_bytes} + {MAX_PAYLOAD_BYTES}"
            )
        self._missing = header_bytes + payload_bytes
        header = memoryview(bytearray(header_bytes))
        self._fill(header)
        message = decode_message(header, self._most_header_bytes)
        check_message(message, payload_bytes, guard)
        return message, landing(message, self._fill)

    def _begin(self, prefix: memoryview, idle_s: float | None) -> bool:
        """Wait for a frame and read its prefix; False when the other side closed between frames."""
        got = None
        while got is None:
            try:
                self._incoming.settimeout(self._timeout_s if idle_s is None else idle_s)
                got = self._incoming.recv_into(prefix)
                self._incoming.settimeout(self._timeout_s)
            except TimeoutError:
                if idle_s is not None:
                    raise PeerError(f"silent for {idle_s:g} s") from None
            except OSError as e:
                raise PeerError(f"{BROKEN}: {e.strerror or e}") from None
        if got == 0:
            return False
        self.began_s = time.monotonic()
        self.received_bytes += got
        self._missing = PREFIX.size - got
        self._fill(prefix[got:])
        return True

    def _fill(self, buffer: memoryview) -> None:
        """Receive straight into the buffer until it is full."""
        at = 0
        while at < buffer.nbytes:
            try:
                got = self._incoming.recv_into(buffer[at : at + CHUNK_BYTES])
            except TimeoutError:
                raise PeerError(
                    f"stalled for {self._timeout_s:g} s in the middle of a frame, {self._missing} bytes short"
                ) from None
            except OSError as e:
                raise PeerError(f"{BROKEN} in the middle of a frame: {e.strerror or e}") from None
            if got == 0:
                raise PeerError(f"closed in the middle of a frame, {self._missing} bytes short")
            at += got
            self.received_bytes += got
            self._missing -= got

    def linger(self, most_s: float) -> None:
        """Discard what comes until the other end closes, at most so long: a connection that is closed with bytes unread
        is reset, and what was sent last may never be looked at."""
        end_s, discarded = time.monotonic() + most_s, memoryview(bytearray(CHUNK_BYTES))
        with contextlib.suppress(OSError):
            while (left_s := end_s - time.monotonic()) > 0:
                self._incoming.settimeout(left_s)
                if not self._incoming.recv_into(discarded):
                    return

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._incoming.close()

    @property
    def connection(self) -> Connection:
        return self._socket

    @property
    def peer_address(self) -> tuple[str, int]:
        """The address of the other end of a TLS connection, as it is seen from here. OSError."""
        assert isinstance(self._socket, TlsConnection), "only peers that are known have one"
        return self._socket.peer_address()

    @property
    def hung_up(self) -> bool:
        """Return whether the other end of a TLS connection has closed it, whatever is still to be received."""
        assert isinstance(self._socket, TlsConnection), "only peers that are known have one"
        return self._socket.hung_up()

    def bare(self) -> socket.socket:
        """The stream under TLS, for other bytes than frames; the other side does the same. OSError when it does not."""
        assert isinstance(self._socket, TlsConnection), "only TLS can be ended"
        self._closed.set()
        return self._socket.bare()


def decode_message(header: memoryview, most_bytes: int = MAX_HEADER_BYTES) -> AnyMessage:
    """PeerError, which does not name the party, for bytes that are no message, or one of more than `most_bytes`."""
    try:
        if header[:1].tobytes() != _ZLIB:
            return _DECODER.decode(header)
        stream = zlib.decompressobj()
        whole = stream.decompress(header, most_bytes + 1)
        if not stream.eof or stream.unused_data:
            raise ValueError(f"compressed, and truncated or of more than {most_bytes} bytes")
        return _DECODER.decode(whole)
    except Exception as e:  # also RecursionError, UnicodeDecodeError, and a field's own UserError
        reason = " ".join(str(e).split())
        raise PeerError(f"frame header is not a known message: {reason[:200]}") from None


def check_message(message: AnyMessage, payload_bytes: int, guard: Guard | None) -> None:
    """PeerError, which does not name the party, for headers of tensors that no honest sender writes, a payload of
    another size, and what `guard` refuses."""
    for header in message.tensors:
        check_header(header)
        # A few bytes may unpack to any number of elements: only what a guard compares with a plan may come packed.
        if header.packing is not None and (guard is None or not isinstance(content(message), Arrived)):
            raise PeerError(f"tensor {header.name!r}: packed as {header.packing.codec!r}, which is not expected here")
    announced = sum(h.nbytes for h in message.tensors)
    if announced != payload_bytes:
        raise PeerError(f"frame payload of {payload_bytes} bytes, its header announces {announced}")
    if guard is not None:
        guard(message)


def connected(
    host: str, port: int, other: str, timeout_s: float, opened: Callable[[int, int], socket.socket] = socket.socket
) -> socket.socket:
    """A socket to the address, as `opened` makes it of a family and a kind. Unreached if nothing answers within
    `timeout_s`."""
    failure: object = "no address"
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connection = opened(family, kind)
            try:
                connection.settimeout(timeout_s)
                connection.connect(address)
            except OSError as e:
                failure = e.strerror or e
                connection.close()
            else:
                return connection
    except (OSError, UnicodeError, OverflowError) as e:  # the last two: what it calls its address is none
        failure = e.strerror if isinstance(e, OSError) and e.strerror else e
    raise Unreached(f"{other}: cannot connect to {shown_address(host, port)}: {failure}")


def dial(
    host: str,
    port: int,
    other: str,
    timeout_s: float,
    *,
    identity: Identity | None = None,
    expected: Party = COORDINATOR,
    most_header_bytes: int = MAX_HEADER_BYTES,
) -> SocketChannel:
    """Connect to the address; `other` is the peer's name in errors. Unreached if nothing answers within `timeout_s`.

    With an identity the connection is TLS, and who answers must be the `expected` party; without, plain TCP.
    """
    connection = connected(host, port, other, timeout_s)
    if identity is None:
        return SocketChannel(connection, other, timeout_s, most_header_bytes=most_header_bytes)
    try:
        secured = secure_dialled(connection, identity, expected)
    except PeerError as e:
        raise type(e)(f"{other} at {shown_address(host, port)}: {e}") from None
    return SocketChannel(secured, other, timeout_s, party=expected, most_header_bytes=most_header_bytes)
