"""Connections from a device to another. The ways to it, the best first:

1. it is dialled at the address where it listens;
2. both connect at the same time, when and where the coordinator says, for NATs and firewalls that admit only answers;
   by IPv4, and by IPv6 where both have it;
3. the coordinator relays.

The first and the second are tried together. Whichever way, both ends are authenticated by TLS.

A direct TCP connection between two devices behind NATs (Ford, Srisuresh and Kegel 2005, "Peer-to-Peer Communication
Across Network Address Translators", section 4).

    A ── SYN ──► NAT of A ──►  ◄── NAT of B ◄── SYN ── B      each NAT admits answers to what its own device has sent

Both devices connect to each other at the same time, from the port of their connection to the coordinator: the
coordinator has seen which public address the NAT gives that port. Both also listen at it, for a NAT that gives the
other device another port but on the side where anybody is admitted.

Nothing here is trusted: the caller authenticates each connection.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence

import msgspec

from isthmus.errors import PeerError
from isthmus.listening import shown_address
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat, RelayConnect, RelayReady, RelayWait, Rendezvous, StreamHello
from isthmus.runtime.transport.channel import SocketChannel, connected, dial
from isthmus.runtime.transport.multi_stream import assembled
from isthmus.runtime.transport.secure import secure_dialled
from isthmus.runtime.transport.tcp import HungUp, until_reached
from isthmus.sanitize import MOST_SHOWN, sanitize

Address = tuple[str, int]
AGAIN_S = 0.1  # between attempts that a router refuses
LOOK_S = 0.05  # how often to look whether it is over
ALIVE_S = 30  # silence after which the kernel says that a connection lives
MOST_AFTER_S = 2.0  # the longest that the coordinator may let a device wait before it connects
_ANY = ("2001:db8::", 9)  # an address beyond every router, to ask the kernel for its route; nothing is sent


def _shared_port(family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a NAT forgets a connection that is silent for minutes
    if hasattr(socket, "TCP_KEEPIDLE"):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_S)
    return found


def _bound(family: int, kind: int) -> socket.socket:
    """A socket of a port that further sockets can share."""
    found = _shared_port(family, kind)
    found.bind(("", 0))
    return found


def own_addresses(here: Address) -> tuple[Address, ...]:
    """At which others may reach this device without a NAT: its IPv6 address, if it has one beyond its own network, with
    the port of `here`."""
    if ":" in here[0]:
        return ()  # the coordinator sees it
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANY)
        found = ipaddress.ip_address(probe.getsockname()[0])
        if not (found.is_loopback or found.is_link_local or found.is_unspecified):
            return ((str(found), here[1]),)
    return ()


def worth_dialling(addresses: Sequence[Address], here: Address) -> list[Address]:
    """Those that can belong to another device. An address of the own machine is only believed on a connection that
    does not leave it."""
    found: list[Address] = []
    for host, port in addresses:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            foreign = address.is_multicast or address.is_unspecified or address.is_link_local
            local = address.is_loopback and not ipaddress.ip_address(here[0]).is_loopback
            if not (foreign or local) and 0 < port < 1 << 16:
                found.append((str(address), port))
    return found


def open_simultaneously(
    here: Address,
    targets: Sequence[Address],
    taken: Callable[[socket.socket], None],
    *,
    after_s: float,
    within_s: float,
    over: threading.Event,
) -> None:
    """Hand to `taken` every connection to one of the targets, or from anywhere to `here`, until `over`, or for
    `within_s` seconds. `taken` must not wait."""
    begin_s = time.monotonic() + min(max(0.0, after_s), MOST_AFTER_S)
    end_s = begin_s + within_s
    due_s = dict.fromkeys(targets, begin_s)
    own = {_family(address): address for address in (*own_addresses(here), here)}
    with selectors.DefaultSelector() as selector:
        try:
            for family, address in own.items():
                _listen(selector, family, address)
            while not over.is_set() and (now_s := time.monotonic()) < end_s:
                for target in [target for target, at_s in due_s.items() if at_s <= now_s]:
                    due_s[target] = end_s if _connect(selector, own, target) else now_s + AGAIN_S
                wait_s = min(LOOK_S, *(max(0.0, at_s - now_s) for at_s in due_s.values())) if due_s else LOOK_S
                for key, _ in selector.select(wait_s):
                    _ready(selector, key, taken, due_s)
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _listen(selector: selectors.BaseSelector, family: socket.AddressFamily, address: Address) -> None:
    """Without, where the port is taken: connecting may do."""
    listener = _shared_port(family)
    try:
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        return
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)


def _connect(selector: selectors.BaseSelector, own: dict[socket.AddressFamily, Address], target: Address) -> bool:
    """Return whether the attempt has begun, or would be of no use."""
    family = _family(target)
    if family not in own:
        return True
    connection = _shared_port(family)
    connection.setblocking(False)
    try:
        connection.bind(own[family])
        code = connection.connect_ex(target)
    except OSError as e:
        code = e.errno
    if code in (0, errno.EINPROGRESS):
        selector.register(connection, selectors.EVENT_WRITE, target)
        return True
    connection.close()
    return code in (errno.EADDRNOTAVAIL, errno.EADDRINUSE)  # the other device's attempt has come first


def _ready(
    selector: selectors.BaseSelector,
    key: selectors.SelectorKey,
    taken: Callable[[socket.socket], None],
    due_s: dict[Address, float],
) -> None:
    near = key.fileobj
    assert isinstance(near, socket.socket)
    if key.data is None:
        with contextlib.suppress(OSError):  # it is gone already
            near = near.accept()[0]
            near.setblocking(True)
            taken(near)
        return
    selector.unregister(near)
    if near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        near.close()
        due_s[key.data] = time.monotonic() + AGAIN_S
    else:
        near.setblocking(True)
        taken(near)


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
                within_s = min(DIRECT_S, self.timeout_s)
                ways.attempt(lambda: connected(route.host, route.port, route.other, within_s))
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
                raise (PeerError if channel.received_bytes else HungUp)(str(e)) from None
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
        near = connected(host, port, "coordinator", self.timeout_s, _bound)
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
        """The connection, or None if there is none in time or no attempt is left and no `more` will come."""
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
    """Keeps this device reachable until `close`: directly, by simultaneous connects, or relayed."""

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
