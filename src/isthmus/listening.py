"""The one place that opens a port: for devices' connections, for the page, and for requests to a model.

But for `runtime.transport.rendezvous`, which for seconds listens at a port that a connection has already.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from typing import NamedTuple

from isthmus.errors import UserError


def listening_socket(host: str, port: int) -> socket.socket:
    """Bound and listening; port 0 is any that is free. UserError for an address that cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), backlog=128, family=family)
    except (OSError, UnicodeError, OverflowError) as e:
        reason = str(e.strerror if isinstance(e, OSError) and e.strerror else e).partition(" (while ")[0]
        taken = isinstance(e, OSError) and e.errno == errno.EADDRINUSE
        remedy = ": another program has this port; --port chooses another, 0 any that is free" if taken else ""
        raise UserError(f"cannot listen on {shown_address(host, port)}: {reason}{remedy}") from None


def shown_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around a host that has colons itself.

    >>> shown_address("::1", 7433)
    '[::1]:7433'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class PrivateListener(NamedTuple):
    """For HTTP of this machine, or of who has the secret."""

    socket: socket.socket
    secret: str  # empty where only this machine can reach the address
    address: str  # without a path


def private_listener(host: str, port: int, command: str) -> PrivateListener:
    """UserError, beginning with the command, for an address that cannot be bound."""
    try:
        listener = listening_socket(host, port)
    except UserError as e:
        raise UserError(f"{command}: {e}; --port 0 takes a free one") from None
    secret = "" if is_loopback(host) else secrets.token_urlsafe(24)
    return PrivateListener(listener, secret, f"http://{shown_address(host, listener.getsockname()[1])}")


def own_hosts(port: int) -> frozenset[str]:
    """The names of this host for its clients. A page of another site may point its own name here: that is none."""
    return frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))
