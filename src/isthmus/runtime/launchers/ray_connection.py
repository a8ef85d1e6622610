"""How this process becomes a driver of a Ray cluster that somebody has started. No cluster is ever started here."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.sanitize import sanitize

OLDEST = (2, 60)
DIAL_S = 5.0
_HERE = ("127.0.0.1", "localhost", "[::1]")


class RayUser(NamedTuple):
    """Who needs Ray, for messages."""

    name: str
    address: str
    """How a person names a cluster's address."""

    @property
    def start(self) -> str:
        """What to do where there is no cluster."""
        return f"start one with `ray start --head`, or name one with {self.address}"


LAUNCHER = RayUser("--on ray", "--on-option address=HOST:PORT")


def ray_library(user: RayUser = LAUNCHER) -> ModuleType:
    """UserError where it is not installed."""
    return import_extra("ray", user.name)


def connect(given: str, user: RayUser = LAUNCHER) -> bool:
    """To the cluster at HOST:PORT, or where none is given to that of RAY_ADDRESS, or of this machine. False for a
    process that is connected already. UserError, in one line, where it cannot be."""
    if (address := check_cluster(given, user)) is None:
        return False
    _connect(ray_library(user), address, user)
    return True


def check_cluster(given: str, user: RayUser = LAUNCHER) -> str | None:
    """The address that `connect` would connect to, None for a process that is connected already. UserError where Ray is
    missing or too old, or nothing answers at the address: Ray itself would wait for ever."""
    ray = ray_library(user)
    if tuple(int(part) for part in str(ray.__version__).split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f'{user.name}: Ray {ray.__version__} is too old, expected {oldest} or newer: pip install "isthmus[ray]"'
        )
    if not ray.is_initialized():
        address = _address(given, user)
        _dial(ray, address, user)
        return address
    if given not in ("", here := ray.get_runtime_context().gcs_address):
        raise UserError(f"{user.name}: address: got {given!r}, but this process is connected to {here}")
    return None


def _address(given: str, user: RayUser) -> str:
    """HOST:PORT of the cluster's head. UserError."""
    text = given or os.environ.get("RAY_ADDRESS", "")
    if text in ("", "auto"):
        noted = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        try:
            text = noted.read_text(encoding="utf-8").strip()
        except OSError:
            raise UserError(f"{user.name}: no Ray cluster was started on this machine: {user.start}") from None
    host, _, port = text.rpartition(":")
    if not host or "/" in text or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{user.name}: {'address' if given else 'RAY_ADDRESS'}: got {text!r}, expected HOST:PORT")
    return text


def _dial(ray: ModuleType, address: str, user: RayUser) -> None:
    """UserError where nothing answers."""
    host, _, port = address.rpartition(":")
    if host in _HERE:
        host = str(ray.util.get_node_ip_address())  # as Ray does
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
    except OSError as e:
        raise UserError(f"{user.name}: no Ray cluster at {address}: {e.strerror or e}: {user.start}") from None


def _connect(ray: ModuleType, address: str, user: RayUser) -> None:
    """UserError where nothing answers that this Ray can use."""
    handler = signal.getsignal(signal.SIGTERM)
    ray._private.worker._worker_logs_enabled = False  # what nodes log would be printed to standard output
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        raise UserError(
            f"{user.name}: the cluster at {address} cannot be used: {sanitize(' '.join(str(e).split()))}"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # with Ray's, SIGTERM would end this process wherever it is
