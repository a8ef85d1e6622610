"""Connections from a device to another. The ways to it, the best first:

1. it is dialled at the address where it listens;
2. both connect at the same time, when and where the coordinator says, for NATs and firewalls that admit only answers;
   by IPv4, and by IPv6 where both have it;
3. the coordinator relays.

The first and the second are tried together. Whichever way, both ends are authenticated by TLS.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Generator

import msgspec

from isthmus.errors import PeerError
from isthmus.listening import shown_address
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat, RelayConnect, RelayReady, RelayWait, Rendezvous, StreamHello
from isthmus.runtime.transport.channel import SocketChannel, connected, dial
from isthmus.runtime.transport.multi_stream import assembled
from isthmus.runtime.transport.secure import secure_dialled
from isthmus.runtime.transport.simultaneous_open import (
    Address,
    connected_from,
    open_simultaneously,
    own_addresses,
    worth_dialling,
)
from isthmus.runtime.transport.tcp import HungUp, until_reached
from isthmus.sanitize import MOST_SHOWN, sanitize

DIRECT_S = 3.0
"""For so long each direct way is tried: a firewall that drops says nothing. The kernel sends again after 1 s."""
HEAD_START_S = 0.3
"""Seconds in which only the address where a device listens is tried, before the coordinator is asked for another
way."""
ANSWER_S = 15.0  # the coordinator waits for the other device before it answers
RELAY_RETRY_S = 1.0  # between attempts to wait at the coordinator's relay


class PeerRoute(msgspec.Struct, frozen=True, kw_only=True):
    """To another device. Without a port there is no direct way."""

    run: str  # the name of the run or of the probe that needs the route
    other: str  # the device, as errors call it
    host: str
    port: int
    id: str  # the id of its key; empty where connections are plain TCP, and nothing is relayed
    streams: int = 1  # streams that are to be one connection; plain TCP has one


class PeerDialer(msgspec.Struct, frozen=True, kw_only=True):
    """How one device gets to others."""

    coordinator: tuple[str, int]
    identity: Identity | None
    timeout_s: float
    direct: bool = True  # whether this device takes part in simultaneous connects, for which it listens for a moment

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
                stream, relayed = self._reached(route, relay_only=relayed)
                found.append(stream)
                stream.send(StreamHello(run=route.run, stream_group=name, number=number, of=route.streams))
        except PeerError:
            for stream in found:
                stream.close()
            raise
        return assembled(found, self.timeout_s), relayed

    def _reached(self, route: PeerRoute, *, relay_only: bool = False) -> tuple[SocketChannel, bool]:
        return until_reached(lambda: self._one(route, relay_only=relay_only), self.timeout_s)

    def _one(self, route: PeerRoute, *, relay_only: bool) -> tuple[SocketChannel, bool]:
        ways = _Ways(lambda near: self._secured(near, route))
        try:
            if route.port and not relay_only:
                ways.attempt(lambda: self._listening(route))
                if (found := ways.first(HEAD_START_S if self.direct else DIRECT_S)) is not None:
                    return found, False
            try:
                return self._by_coordinator(route, ways, direct=self.direct and not relay_only)
            except PeerError as e:
                if (found := ways.first(DIRECT_S)) is not None:  # a busy device may still be about to answer
                    return found, False
                why = ways.failure or f"{route.other}: {'' if route.port else 'does not listen'}"
                raise type(e)(f"{why}; relayed by the coordinator: {e}") from None
        finally:
            ways.close()

    def _listening(self, route: PeerRoute) -> socket.socket:
        return connected(route.host, route.port, route.other, min(DIRECT_S, self.timeout_s))

    def _secured(self, near: socket.socket, route: PeerRoute) -> SocketChannel:
        assert self.identity is not None, "plain connections are not secured"
        near.settimeout(self.timeout_s)
        expected = Party("device", route.id)
        try:
            secured = secure_dialled(near, self.identity, expected)
        except PeerError as e:
            raise type(e)(f"{route.other}: {e}") from None
        return SocketChannel(secured, route.other, self.timeout_s, party=expected)

    def _by_coordinator(self, route: PeerRoute, ways: _Ways, *, direct: bool) -> tuple[SocketChannel, bool]:
        """And whether it is relayed."""
        channel, here = self.coordinator_channel()
        try:
            own = own_addresses(here) if direct else ()
            try:
                channel.send(RelayConnect(run=route.run, id=route.id, addresses=own, direct=direct))
                answer = _answered(channel, max(self.timeout_s, ANSWER_S))
            except PeerError as e:
                # In TLS 1.3 this end of the handshake is done first: a coordinator may still cut it for want of room.
                raise (PeerError if channel.statistics().received_bytes else HungUp)(str(e)) from None
            if isinstance(answer, Rendezvous):
                with _connecting(here, answer, lambda near: ways.attempt(lambda: near)):
                    found = ways.first(DIRECT_S, more=True)
                if found is not None:
                    channel.close()
                    return found, False
                channel.send(RelayReady(run=route.run))
                answer = _answered(channel, max(self.timeout_s, ANSWER_S))
            if not isinstance(answer, RelayReady) or answer.failure:
                raise PeerError(_refusal(answer))
            return self._secured(channel.bare(), route), True
        except (PeerError, OSError) as e:
            channel.close()
            raise e if isinstance(e, PeerError) else PeerError(str(e)) from None

    def coordinator_channel(self) -> tuple[SocketChannel, Address]:
        """A connection to the coordinator, and its address here, whose port others can share. PeerError."""
        host, port = self.coordinator
        near = connected_from(host, port, "coordinator", self.timeout_s)
        here = near.getsockname()[:2]
        expected = Party("coordinator", "")
        assert self.identity is not None, "who has no identity dials no coordinator for others"
        try:
            secured = secure_dialled(near, self.identity, expected)
        except PeerError as e:
            raise type(e)(f"coordinator at {shown_address(host, port)}: {e}") from None
        return SocketChannel(secured, "coordinator", self.timeout_s, party=expected), here


class _Ways:
    """Several attempts to reach one device, each in a thread of its own: the first connection that is authenticated is
    taken, the others are closed."""

    def __init__(self, secured: Callable[[socket.socket], SocketChannel]) -> None:
        self._secured = secured
        self._changed = threading.Condition()
        self._found: SocketChannel | None = None
        self._running = 0
        self._over = False
        self.failure: PeerError | None = None  # the error of the first attempt that failed

    def attempt(self, reach: Callable[[], socket.socket]) -> None:
        with self._changed:
            self._running += 1
        threading.Thread(target=self._try, args=(reach,), name="reach", daemon=True).start()

    def first(self, within_s: float, *, more: bool = False) -> SocketChannel | None:
        """The connection, which is the caller's; None if there is none in time, or no attempt is left and there will be
        no `more`."""
        with self._changed:
            self._changed.wait_for(lambda: self._found is not None or not (self._running or more), within_s)
            found, self._found = self._found, None
            self._over = self._over or found is not None
        return found

    def close(self) -> None:
        with self._changed:
            self._over = True
            found, self._found = self._found, None
        if found is not None:
            found.close()

    def _try(self, reach: Callable[[], socket.socket]) -> None:
        found: SocketChannel | None = None
        failure: PeerError | None = None
        try:
            found = self._secured(reach())
        except PeerError as e:
            failure = e
        with self._changed:
            self._running -= 1
            self.failure = self.failure or failure
            if not self._over and self._found is None:
                self._found, found = found, None
            self._changed.notify_all()
        if found is not None:
            found.close()


@contextlib.contextmanager
def _connecting(here: Address, asked: Rendezvous, taken: Callable[[socket.socket], None]) -> Generator[None]:
    """While inside, connect to the other device as the coordinator says; `taken` gets what comes of it."""
    over = threading.Event()
    threading.Thread(
        target=open_simultaneously,
        args=(here, worth_dialling(asked.addresses, here), taken),
        kwargs={"after_s": asked.after_s, "within_s": DIRECT_S, "over": over},
        name="simultaneous open",
        daemon=True,
    ).start()
    try:
        yield
    finally:
        over.set()


class RelayStandby:
    """Keeps this device reachable through the coordinator, until `close`: directly, by simultaneous connects, or
    relayed."""

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
                channel, here, answer = self._wanted()
            except (PeerError, OSError):
                self._over.wait(RELAY_RETRY_S)
            else:
                threading.Thread(target=self._meet, args=(channel, here, answer), name="meet", daemon=True).start()

    def _wanted(self) -> tuple[SocketChannel, Address, AnyMessage]:
        """A connection by which another device wants to reach this one, and what the coordinator says of it."""
        channel, here = self._dialer.coordinator_channel()
        self._channel = channel
        try:
            if self._over.is_set():  # `close` has not seen this connection
                raise PeerError("the relay connection was closed")
            direct = self._dialer.direct
            channel.send(RelayWait(run=self._run, addresses=own_addresses(here) if direct else (), direct=direct))
            while isinstance(answer := _answered(channel, self._dialer.timeout_s), Heartbeat):
                channel.send(Heartbeat(run=""))
            return channel, here, answer
        except (PeerError, OSError):
            channel.close()
            raise

    def _meet(self, channel: SocketChannel, here: Address, answer: AnyMessage) -> None:
        try:
            if isinstance(answer, Rendezvous):
                with _connecting(here, answer, self._taken):
                    _answered(channel, max(self._dialer.timeout_s, ANSWER_S))
            channel.send(RelayReady(run=self._run))
            self._taken(channel.bare())
        except (PeerError, OSError):  # the other device has found a direct way, or is gone
            channel.close()


def _answered(channel: SocketChannel, timeout_s: float) -> AnyMessage:
    def check(message: AnyMessage) -> None:
        if not isinstance(message, Heartbeat | Rendezvous | RelayReady) or message.tensors:
            raise PeerError(f"sent {type(message).__name__} on a connection that waits at the relay")

    received = channel.receive(check, idle_s=timeout_s)
    if received is None:
        raise PeerError(f"{channel.other}: closed the connection")
    return received[0]


def _refusal(answer: AnyMessage) -> str:
    text = answer.failure if isinstance(answer, RelayReady) else f"sent {type(answer).__name__}"
    return sanitize(text)[:MOST_SHOWN]
