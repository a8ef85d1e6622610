"""A direct TCP connection between two devices behind NATs (Ford, Srisuresh and Kegel 2005, "Peer-to-Peer Communication
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
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from isthmus.listening import shown_address
from isthmus.runtime.transport.tcp import Unreached

Address = tuple[str, int]
AGAIN_S = 0.1  # between attempts that a router refuses
LOOK_S = 0.05  # how often to look whether it is over
ALIVE_S = 30  # silence after which the kernel says that a connection lives
MOST_AFTER_S = 2.0  # the longest that the coordinator may let a device wait before it connects
_ANY = ("2001:db8::", 9)  # an address beyond every router, to ask the kernel for its route; nothing is sent


def connected_from(host: str, port: int, other: str, timeout_s: float) -> socket.socket:
    """As `channel.connected`, from a port that further sockets can share."""
    failure: object = "no address"
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connection = _shared_port(family, kind)
            try:
                connection.settimeout(timeout_s)
                connection.bind(("", 0))
                connection.connect(address)
            except OSError as e:
                failure = e.strerror or e
                connection.close()
            else:
                return connection
    except (OSError, UnicodeError, OverflowError) as e:
        failure = e.strerror if isinstance(e, OSError) and e.strerror else e
    raise Unreached(f"{other}: cannot connect to {shown_address(host, port)}: {failure}")


def _shared_port(family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a NAT forgets a connection that is silent for minutes
    if hasattr(socket, "TCP_KEEPIDLE"):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_S)
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
    """Whether the attempt has begun, or would be of no use."""
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
