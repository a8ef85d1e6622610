"""The one place that opens a port: for devices' connections, and for the page."""

from __future__ import annotations

import ipaddress
import socket

from isthmus.errors import UserError


def listening_socket(host: str, port: int) -> socket.socket:
    """Bound and listening; port 0 is any that is free. UserError for an address that cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), backlog=128, family=family)
    except (OSError, UnicodeError, OverflowError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise UserError(f"cannot listen on {host}:{port}: {reason}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
