"""Connections from a device to another: direct, or relayed by the coordinator if they cannot reach each other."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable

import msgspec

from isthmus.errors import PeerError
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat, RelayConnect, RelayReady, RelayWait, StreamHello
from isthmus.runtime.transport.channel import SocketChannel, connected, dial
from isthmus.runtime.transport.multi_stream import assembled
from isthmus.runtime.transport.secure import secure_dialled
from isthmus.runtime.transport.tcp import until_reached
from isthmus.sanitize import MOST_SHOWN, sanitize

DIRECT_S = 5.0
"""For so long the direct way is tried: a firewall that drops says nothing."""
ANSWER_S = 15.0
"""The coordinator waits for the other device before it answers."""
RELAY_RETRY_S = 1.0
"""Between attempts to wait at the coordinator's relay."""


class PeerRoute(msgspec.Struct, frozen=True, kw_only=True):
    """To another device. Without a port there is no direct way."""

    run: str
    """What for: the name of a run or of a probe."""
    other: str
    """The device, as errors call it."""
    host: str
    port: int
    id: str
    """Of its key; empty where connections are plain TCP, and nothing is relayed."""
    streams: int = 1
    """Streams that are to be one connection; plain TCP has one."""


class PeerDialer(msgspec.Struct, frozen=True, kw_only=True):
    """How one device gets to others."""

    coordinator: tuple[str, int]
    identity: Identity | None
    timeout_s: float

    def dial(self, route: PeerRoute) -> tuple[SocketChannel, bool]:
        """A connection to the device, which is authenticated, and whether it is relayed. PeerError if it cannot be
        reached. Tries again if the other side closes the connection before it knows its caller."""
        if self.identity is None:
            return dial(route.host, route.port, route.other, self.timeout_s), False
        if route.streams == 1:
            return self._reached(route)
        found: list[SocketChannel] = []
        relayed, name = False, secrets.token_hex(8)
        try:
            for number in range(route.streams):
                stream, relayed = self._reached(route)
                found.append(stream)
                stream.send(StreamHello(run=route.run, stream_group=name, number=number, of=route.streams))
        except PeerError:
            for stream in found:
                stream.close()
            raise
        return assembled(found, self.timeout_s), relayed

    def _reached(self, route: PeerRoute) -> tuple[SocketChannel, bool]:
        return until_reached(lambda: self._one(route), self.timeout_s)

    def _one(self, route: PeerRoute) -> tuple[SocketChannel, bool]:
        try:
            near = self._direct(route)
        except PeerError as e:
            try:
                return self._secured(self._relayed(route), route), True
            except PeerError as f:
                raise type(f)(f"{e}; relayed by the coordinator: {f}") from None
        return self._secured(near, route), False

    def _direct(self, route: PeerRoute) -> socket.socket:
        if not route.port:
            raise PeerError(f"{route.other}: does not listen")
        found = connected(route.host, route.port, route.other, min(DIRECT_S, self.timeout_s))
        found.settimeout(self.timeout_s)
        return found

    def _secured(self, near: socket.socket, route: PeerRoute) -> SocketChannel:
        assert self.identity is not None, "plain connections are not secured"
        expected = Party("device", route.id)
        try:
            secured = secure_dialled(near, self.identity, expected)
        except PeerError as e:
            raise type(e)(f"{route.other}: {e}") from None
        return SocketChannel(secured, route.other, self.timeout_s, party=expected)

    def _relayed(self, route: PeerRoute) -> socket.socket:
        channel = self.coordinator_channel()
        try:
            channel.send(RelayConnect(run=route.run, id=route.id))
            answer = _answered(channel, max(self.timeout_s, ANSWER_S))
            if not isinstance(answer, RelayReady) or answer.failure:
                raise PeerError(_refusal(answer))
            return channel.bare()
        except (PeerError, OSError) as e:
            channel.close()
            raise PeerError(str(e)) from None

    def coordinator_channel(self) -> SocketChannel:
        return dial(
            *self.coordinator,
            "coordinator",
            self.timeout_s,
            identity=self.identity,
            expected=Party("coordinator", ""),
        )


class RelayStandby:
    """Keeps this device reachable through the coordinator's relay, until `close`."""

    def __init__(self, dialer: PeerDialer, run: str, taken: Callable[[socket.socket], None]) -> None:
        """`taken` receives each connection that another device requested. An unreachable coordinator is tried again."""
        self._dialer = dialer
        self._run = run
        self._taken = taken
        self._over = threading.Event()
        self._channel: SocketChannel | None = None
        threading.Thread(target=self._stay, name="waiting_device", daemon=True).start()

    def close(self) -> None:
        self._over.set()
        if (channel := self._channel) is not None:
            channel.close()

    def _stay(self) -> None:
        while not self._over.is_set():
            try:
                self._taken(self._wanted())
            except (PeerError, OSError):
                self._over.wait(RELAY_RETRY_S)

    def _wanted(self) -> socket.socket:
        """The next connection that another device has to here."""
        channel = self._channel = self._dialer.coordinator_channel()
        try:
            if self._over.is_set():  # `close` has not seen this connection
                raise PeerError("the relay connection was closed")
            channel.send(RelayWait(run=self._run))
            while not isinstance(_answered(channel, self._dialer.timeout_s), RelayReady):
                channel.send(Heartbeat(run=""))
            channel.send(RelayReady(run=self._run))
            return channel.bare()
        except (PeerError, OSError):
            channel.close()
            raise


def _answered(channel: SocketChannel, timeout_s: float) -> AnyMessage:
    def check(message: AnyMessage) -> None:
        if not isinstance(message, Heartbeat | RelayReady) or message.tensors:
            raise PeerError(f"sent {type(message).__name__} on a connection that waits at the relay")

    received = channel.receive(check, idle_s=timeout_s)
    if received is None:
        raise PeerError(f"{channel.other}: closed the connection")
    return received[0]


def _refusal(answer: AnyMessage) -> str:
    text = answer.failure if isinstance(answer, RelayReady) else f"sent {type(answer).__name__}"
    return sanitize(text)[:MOST_SHOWN]
