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
from isthmus.extensions import import_extra, to_install
from isthmus.sanitize import sanitize
from isthmus.units import whole_number

OLDEST = (2, 60)
DIAL_S = 5.0
_HERE = ("127.0.0.1", "localhost", "[::1]")


class RayUser(NamedTuple):
    """The name of a user of Ray, for messages."""

    name: str
    address: str  # how a person names a cluster's address

    @property
    def start(self) -> str:
        """The advice for people where there is no cluster."""
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
            f"{user.name}: Ray {ray.__version__} is too old, expected {oldest} or newer: {to_install('ray')}"
        )
    if not ray.is_initialized():
        address = _address(given, user)
        _dial(ray, address, user)
        return address
    if given not in ("", here := ray.get_runtime_context().gcs_address):
        raise UserError(f"{user.name}: address: got {given!r}, but this process is connected to {here}")
    return None


TOKEN = (
    "; if the cluster wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH: Ray tells a "
    "wrong one from a cluster that does not answer only then"
)


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
    if not host or "/" in text or not 0 < (whole_number(port) or 0) < 65536:
        raise UserError(f"{user.name}: {'address' if given else 'RAY_ADDRESS'}: got {text!r}, expected HOST:PORT")
    return text


def _dial(ray: ModuleType, address: str, user: RayUser) -> None:
    """UserError where nothing answers, or a cluster that wants a token which this process has not: Ray itself would
    try for half a minute, and then not say why."""
    host, _, port = address.rpartition(":")
    if host in _HERE:
        host = str(ray.util.get_node_ip_address())  # as Ray does
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
    except OSError as e:
        raise UserError(f"{user.name}: no Ray cluster at {address}: {e.strerror or e}: {user.start}") from None
    try:
        ray._raylet.GcsClient(address=f"{host}:{port}")
    except ray.exceptions.AuthenticationError:
        raise UserError(
            f"{user.name}: the cluster at {address} wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to "
            "what `ray get-auth-token` prints on its head"
        ) from None
    except ray.exceptions.RayError:
        pass  # `ray.init` says what it is


def _connect(ray: ModuleType, address: str, user: RayUser) -> None:
    """UserError where nothing answers that this Ray can use."""
    handler = signal.getsignal(signal.SIGTERM)
    ray._private.worker._worker_logs_enabled = False  # what nodes log would be printed to standard output
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        token = "" if os.environ.get("RAY_AUTH_MODE") == "token" else TOKEN
        reason = sanitize(" ".join(str(e).split()))
        raise UserError(f"{user.name}: the cluster at {address} cannot be used: {reason}{token}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # with Ray's, SIGTERM would end this process wherever it is
