"""Several TCP streams as one channel, to fill a link that a single flow cannot fill.

A flow carries at most a window each round trip, and a loss halves it. Blocks of bytes go to the streams in turn, so the
receiver knows without numbers where the next one comes from:

    block 0 ──► stream 0     block 1 ──► stream 1     ...     block N ──► stream 0

Each stream is authenticated by itself, and each block begins with its length (u32).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.runtime.identity import Party
from isthmus.runtime.messages.run import StreamHello
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.secure import Connection
from isthmus.wire_types import MOST_STREAMS

BLOCK_BYTES = 1 << 18
WINDOW_BYTES = 4 << 20  # about what one flow has on the way at most: Linux lets windows grow to 4 to 6 MB
MOST_UNFINISHED = 64  # groups of streams that are not complete
_LENGTH = struct.Struct(">I")


def streams_for(link: Link) -> int:
    """Return how many streams fill a link, going by its bandwidth-delay product."""
    on_the_way_bytes = link.bandwidth_bytes_per_s * 2 * link.latency_s
    return int(min(MOST_STREAMS, max(1, -(-on_the_way_bytes // WINDOW_BYTES))))


def may_gain(link: Link) -> bool:
    """Return whether more streams might carry more than what was measured: half a window is on the way, or more."""
    return link.bandwidth_bytes_per_s * 2 * link.latency_s >= WINDOW_BYTES / 2


class MultiStream:
    """A `Connection` of several. One thread sends and one receives, each on a `dup` of its own."""

    def __init__(self, streams: Sequence[Connection]) -> None:
        self._streams = list(streams)
        self._out = self._in = 0  # whose turn it is
        self._left = 0  # bytes of the block that is being received
        self._length = bytearray()

    @property
    def family(self) -> int:
        return self._streams[0].family

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        for stream in self._streams:
            stream.setsockopt(level, name, value)

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return the option of one stream: all go the same way."""
        return self._streams[0].getsockopt(level, name, size)

    def settimeout(self, timeout_s: float | None, /) -> None:
        for stream in self._streams:
            stream.settimeout(timeout_s)

    def dup(self) -> MultiStream:
        return MultiStream([stream.dup() for stream in self._streams])

    def sendmsg(self, pieces: Sequence[memoryview], /) -> int:
        """Sends all of it. TimeoutError, OSError."""
        sent = 0
        for block in _blocks(pieces):
            size = sum(piece.nbytes for piece in block)
            left = [memoryview(_LENGTH.pack(size)), *block]
            while left:
                done = self._streams[self._out].sendmsg(left)
                while left and done >= left[0].nbytes:
                    done -= left.pop(0).nbytes
                if done:
                    left[0] = left[0][done:]
            self._out = (self._out + 1) % len(self._streams)
            sent += size
        return sent

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive bytes of one block; 0 when the other side has closed. TimeoutError, OSError."""
        stream = self._streams[self._in]
        while not self._left:
            piece = memoryview(bytearray(_LENGTH.size - len(self._length)))
            got = stream.recv_into(piece)
            if not got:
                return 0
            self._length += piece[:got]
            if len(self._length) == _LENGTH.size:
                (self._left,) = _LENGTH.unpack(self._length)
                self._length.clear()
                if not 0 < self._left <= BLOCK_BYTES:
                    raise OSError(f"a block of {self._left} bytes, expected at most {BLOCK_BYTES}")
        got = stream.recv_into(buffer[: self._left])
        self._left -= got
        if not self._left:
            self._in = (self._in + 1) % len(self._streams)
        return got

    def shutdown(self, how: int, /) -> None:
        for stream in self._streams:
            stream.shutdown(how)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _blocks(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes in order, as lists of pieces of `BLOCK_BYTES` together at most."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            part = piece[at : at + room]
            block.append(part)
            at += part.nbytes
            room -= part.nbytes
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


class StreamAssembler:
    """The accepting side: puts together the streams that come, by the name that the dialling side gave them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._unfinished: dict[tuple[Party | None, str, int], dict[int, SocketChannel]] = {}

    def add(self, channel: SocketChannel, stream: StreamHello) -> SocketChannel | None:
        """The channel, if this stream completes its group; None while other streams are missing. PeerError if the
        stream is not a valid part of a group."""
        if not 1 < stream.of <= MOST_STREAMS or not 0 <= stream.number < stream.of:
            raise PeerError(f"{channel.other}: stream {stream.number} of {stream.of}")
        name = (channel.party, stream.stream_group, stream.of)
        with self._lock:
            if len(self._unfinished) >= MOST_UNFINISHED and name not in self._unfinished:
                raise PeerError(f"{channel.other}: too many incomplete groups of streams")
            found = self._unfinished.setdefault(name, {})
            if stream.number in found:
                raise PeerError(f"{channel.other}: stream {stream.number} came twice")
            found[stream.number] = channel
            if len(found) < stream.of:
                return None
            del self._unfinished[name]
        return assembled([found[number] for number in range(stream.of)], self._timeout_s)


def assembled(channels: Sequence[SocketChannel], timeout_s: float) -> SocketChannel:
    """The channels as one; they are not used by themselves any more."""
    first = channels[0]
    return SocketChannel(MultiStream([c.connection for c in channels]), first.other, timeout_s, party=first.party)
