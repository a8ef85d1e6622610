"""A fleet's coordinator that listens, for one command."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from isthmus.api.states import PORT, state_folder, timeout_s
from isthmus.errors import UserError
from isthmus.listening import shown_address
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import Addresses, FleetState
from isthmus.units import parse_duration, whole_number


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # address to listen on
    port: int = PORT  # 0: any that is free
    addresses: tuple[str, ...] = ()  # HOST or HOST:PORT by which devices reach it; none: `host`
    tickets: int = 0  # so many are made at the start
    timeout: str = "60 s"  # silence after which a device is lost
    renew_after_absence: str = "0 s"
    """For so long a device may be away and needs no ticket when it comes back, though certificates end after a day."""
    state: Path | None = None  # folder with the fleet's keys; none: ~/.local/state/isthmus/fleet
    ticket: Callable[[str], None] = lambda _: None  # is given each ticket


@contextlib.contextmanager
def serving_fleet(serving: Serving, log: Callable[[str], None]) -> Generator[FleetCoordinator]:
    renewed_s = parse_duration(serving.renew_after_absence, "--renew-after-absence")
    fleet = FleetState(serving.state or state_folder("fleet"))
    with (
        fleet.served(),
        FleetCoordinator(
            fleet,
            serving.host,
            serving.port,
            timeout_s=timeout_s(serving.timeout),
            log=log,
            renew_after_absence_s=renewed_s,
        ) as service,
    ):
        fleet.listens_at(_addresses(serving, service.port))
        service.start()
        log(f"listening on {shown_address(serving.host, service.port)} with TLS; state folder {fleet.folder}")
        for _ in range(serving.tickets):
            serving.ticket(fleet.ticket())
        if serving.tickets:
            log("each ticket lets one machine join, within 24 hours: `isthmus join` asks for it")
        yield service


def _addresses(serving: Serving, port: int) -> Addresses:
    """UserError where nobody could tell how the coordinator is reached."""
    if serving.addresses:
        return tuple(address_of(text, port) for text in serving.addresses)
    if _is_wildcard(serving.host):
        raise UserError(f"--host {serving.host!r}: tickets need an address that devices can dial: add --address HOST")
    return ((serving.host, port),)


def _is_wildcard(host: str) -> bool:
    """Return whether an address stands for every address, as "" and "0" do. It can be bound."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return any(ipaddress.ip_address(entry[4][0]).is_unspecified for entry in found)


def address_of(text: str, port: int, option: str = "--address") -> tuple[str, int]:
    """HOST, HOST:PORT, or [HOST]:PORT for one with colons. UserError, which names the option."""
    if not text.strip("[]: "):
        raise UserError(f"{option}: got {text!r}, expected HOST or HOST:PORT")
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        return text.strip("[]"), port
    if not 0 < (whole_number(number) or 0) < 65536:
        raise UserError(f"{option} {text}: port: got {number!r}, expected a number up to 65535")
    return host.strip("[]"), int(number)
